; NCCL 2.32: what iris_triton.language.gin calls, in terms of libnccl_device.bc.
; Triton passes numbers only, so the structures that NCCL takes are made here, on the stack of every thread.
target triple = "nvptx64-nvidia-cuda"
%team = type { i32, i32, i32 }
%coop = type { [16 x i8], ptr }

declare void @ncclGin_C_init(ptr, i32, ptr, i32)
declare %team @ncclTeamWorld(ptr)
declare void @ncclCoopAnyInitCta(ptr)
declare void @ncclGinPut_v3(ptr, ptr byval(%team), i32, ptr, i64, ptr, i64, i64, i32, ptr, i64, i32, i1 zeroext, i32, i64, i1 zeroext, i32, ptr byval(%coop), i1 zeroext, ptr, i32, i32, i32, i32)
declare void @ncclGinSignal_v3(ptr, ptr byval(%team), i32, i32, ptr, i64, i32, i1 zeroext, i32, i64, ptr byval(%coop), i1 zeroext, ptr, i32, i32, i32)
declare void @ncclGinFlush(ptr, ptr byval(%coop), i32)
declare void @ncclGinGet(ptr, ptr byval(%team), i32, ptr, i64, ptr, i64, i64, ptr byval(%coop), i1 zeroext, ptr, i32)
declare ptr @ncclGetLsaPointer(ptr, i64, i32)

define internal void @iris_gin_open(ptr %comm, ptr %net, ptr %team, ptr %coop) {
  call void @ncclGin_C_init(ptr %net, i32 -1, ptr %comm, i32 0)  ; every backend, context 0
  %world = call %team @ncclTeamWorld(ptr %comm)
  store %team %world, ptr %team
  call void @ncclCoopAnyInitCta(ptr %coop)
  ret void
}

; Put, and then add to a word of the peer's window; none if its offset is negative.
; A signal of type 1 is a word of a window; it is a strong one: whoever sees it sees all puts before it.
; Stores of the threads (scope 3) are released to the system (scope 0).
define i32 @iris_gin_put(i64 %comm_, i64 %window_, i32 %peer, i64 %to, i64 %from, i64 %bytes, i64 %word, i64 %value) {
  %comm = inttoptr i64 %comm_ to ptr
  %window = inttoptr i64 %window_ to ptr
  %net = alloca [128 x i8], align 8
  %team = alloca %team, align 4
  %coop = alloca %coop, align 8
  call void @iris_gin_open(ptr %comm, ptr %net, ptr %team, ptr %coop)
  %signals = icmp sge i64 %word, 0
  %type = zext i1 %signals to i32
  call void @ncclGinPut_v3(ptr %net, ptr byval(%team) %team, i32 %peer, ptr %window, i64 %to, ptr %window, i64 %from, i64 %bytes, i32 %type, ptr %window, i64 %word, i32 0, i1 zeroext true, i32 1, i64 %value, i1 zeroext false, i32 0, ptr byval(%coop) %coop, i1 zeroext false, ptr null, i32 3, i32 0, i32 0, i32 0)
  ret i32 0
}

define i32 @iris_gin_signal(i64 %comm_, i64 %window_, i32 %peer, i64 %word, i64 %value) {
  %comm = inttoptr i64 %comm_ to ptr
  %window = inttoptr i64 %window_ to ptr
  %net = alloca [128 x i8], align 8
  %team = alloca %team, align 4
  %coop = alloca %coop, align 8
  call void @iris_gin_open(ptr %comm, ptr %net, ptr %team, ptr %coop)
  call void @ncclGinSignal_v3(ptr %net, ptr byval(%team) %team, i32 %peer, i32 1, ptr %window, i64 %word, i32 0, i1 zeroext true, i32 1, i64 %value, ptr byval(%coop) %coop, i1 zeroext false, ptr null, i32 3, i32 0, i32 0)
  ret i32 0
}

; What is got is there after a flush.
define i32 @iris_gin_get(i64 %comm_, i64 %window_, i32 %peer, i64 %from, i64 %to, i64 %bytes) {
  %comm = inttoptr i64 %comm_ to ptr
  %window = inttoptr i64 %window_ to ptr
  %net = alloca [128 x i8], align 8
  %team = alloca %team, align 4
  %coop = alloca %coop, align 8
  call void @iris_gin_open(ptr %comm, ptr %net, ptr %team, ptr %coop)
  call void @ncclGinGet(ptr %net, ptr byval(%team) %team, i32 %peer, ptr %window, i64 %from, ptr %window, i64 %to, i64 %bytes, ptr byval(%coop) %coop, i1 zeroext false, ptr null, i32 0)
  ret i32 0
}

define i32 @iris_gin_flush(i64 %comm_) {
  %comm = inttoptr i64 %comm_ to ptr
  %net = alloca [128 x i8], align 8
  %team = alloca %team, align 4
  %coop = alloca %coop, align 8
  call void @iris_gin_open(ptr %comm, ptr %net, ptr %team, ptr %coop)
  call void @ncclGinFlush(ptr %net, ptr byval(%coop) %coop, i32 2)  ; acquire
  ret i32 0
}

define i64 @iris_lsa_pointer(i64 %window_, i64 %offset, i32 %member) {
  %window = inttoptr i64 %window_ to ptr
  %pointer = call ptr @ncclGetLsaPointer(ptr %window, i64 %offset, i32 %member)
  %address = ptrtoint ptr %pointer to i64
  ret i64 %address
}
