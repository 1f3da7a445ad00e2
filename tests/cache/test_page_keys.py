"""Keys of pages: their definition, and that nothing else has the same one."""

from __future__ import annotations

from hashlib import blake2b

from ktransformers.cache.page_keys import page_key, root_key


def test_a_key_is_the_hash_of_the_key_before_and_of_the_tokens_as_int32() -> None:
    parent, tokens = bytes(range(32)), [1, 300, 70000]
    plain = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert page_key(parent, tokens) == blake2b(parent + plain, digest_size=32).digest()


def test_whatever_differs_has_another_key() -> None:
    roots = {
        root_key(fingerprint, size, kind, salt)
        for fingerprint in (b"a" * 32, b"b" * 32)
        for size in (16, 17)
        for kind in ("auto", "int8", "")
        for salt in ("", "auto", "x", "\ud800")
    }
    assert len(roots) == 2 * 2 * 3 * 4
    keys = {page_key(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1, 2, 0])}
    assert len(keys) == 3 * len(roots)
