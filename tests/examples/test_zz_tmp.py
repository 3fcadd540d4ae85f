import jobs_models, pytest, jobs_examples
from iris_core.errors import IrisError
M = [
 ("32_ring_attention.py", "ctx.wait(free + head * 2 + (n + 1) % 2, readers * (n // 2))", "pass"),
 ("32_ring_attention.py", "readers * (n // 2)", "readers * (n // 2) - 2"),
 ("31_flash_decode.py", "half = (turn % 2) * (WORLD * PIECES)", "half = 0"),
 ("33_moe.py", "half = counts + turn % 2 * (WORLD * EXPERTS)", "half = counts"),
 ("33_moe.py", "        ctx.wait(met + peer, turn)\n", ""),
 ("33_moe.py", "                ctx.wait(arrived + peer * LOCAL + expert, turn)\n", "                pass\n"),
 ("33_moe.py", "    ctx.wait(returned, tl.load(state + 1))\n", ""),
 ("34_norm.py", "        ctx.wait(done + i, turn)\n", "        pass\n"),
 ("34_norm.py", "            ctx.wait(arrived + peer * tiles + tile, turn)\n", ""),
 ("31_flash_decode.py", "        ctx.wait(arrived + row, turn * (WORLD * PIECES))\n", ""),
]
@pytest.mark.parametrize("name,right,wrong", M)
def test_mut(pool, tmp_path, name, right, wrong):
    text = (jobs_examples.EXAMPLES / name).read_text()
    assert right in text
    p = tmp_path / name
    p.write_text(text.replace(right, wrong))
    with pytest.raises(IrisError) as e:
        pool.run(jobs_models.in_a_row, 2, str(p), 6, "cpu", False)
    print(name, right, str(e.value)[-200:])
