"""What a kernel touches: addresses, and which of them it may read and write."""
