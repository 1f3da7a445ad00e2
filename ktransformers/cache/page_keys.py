"""Names of the cache's pages outside of the device: 32 bytes that say what a page is the cache of. Pure.

    root  = blake2b(fingerprint of the model, page size, type of keys and values, salt)
    key   = blake2b(key of the page before, or root; the page's own token ids as little-endian int32)

So equal keys mean equal contents, in any process and after any restart. Token ids cannot be read from a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

__all__ = ["KEY_NBYTES", "page_key", "root_key"]

KEY_NBYTES = 32


def root_key(fingerprint: bytes, page_size: int, kv_type: str, salt: str) -> bytes:
    """Return the key that takes the place of a parent's for first pages. fingerprint: of all that decides a token's
    keys and values but the tokens.
    """
    digest = blake2b(digest_size=KEY_NBYTES)
    for part in (fingerprint, page_size.to_bytes(8, "little"), kv_type.encode(), salt.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little"))  # or two splits of the same bytes would be one key
        digest.update(part)
    return digest.digest()


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of the page of these tokens behind `parent`."""
    return blake2b(parent + pack(f"<{len(token_ids)}i", *token_ids), digest_size=KEY_NBYTES).digest()
