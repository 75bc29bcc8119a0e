"""DeepSeek-V4.1: sparse attention over shared compressed keys, Engram memory, a split decoder and a block drafter."""
