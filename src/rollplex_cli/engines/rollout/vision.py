"""Vision embeddings of the rollout that outlive its cache: kept for the groups that asked for them.

Import only after `host.import_sglang`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.multimodal_cache import MultiModalStaticCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class KeptEmbeddings(MultiModalStaticCache):
    """SGLang's cache of vision embeddings, in which those that groups want are beyond its limit.

    So a medium that several groups show, or that a prefill takes in several chunks, goes through the tower once,
    however small the cache is.
    """

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self._wanted: Counter[int] = Counter()
        self._kept: dict[int, Any] = {}

    def want(self, hashes: Sequence[int]) -> None:
        """Keep the embeddings of these media from now on, once more each."""
        self._wanted.update(hashes)

    def give_up(self, hashes: Sequence[int]) -> None:
        """Undo one `want` of each; what nobody wants any more is let go."""
        self._wanted.subtract(hashes)
        for key in hashes:
            if self._wanted[key] <= 0:
                del self._wanted[key]
                self._kept.pop(key, None)

    def pieces_of(self, hashes: Sequence[int]) -> tuple[torch.Tensor, ...] | None:
        """[merged patches, columns] of each of these media; None until the tower has seen all of them."""
        found = [self.get_single(key) for key in hashes]
        return None if any(entry is None for entry in found) else tuple(entry.embedding for entry in found)

    def get_single(self, mm_hash: int) -> Any:
        """SGLang's look-up of one medium."""
        kept = self._kept.get(mm_hash)
        return kept if kept is not None else super().get_single(mm_hash)

    def set(self, mm_hash: int, embedding: Any, loc: torch.Tensor | None = None) -> bool:
        """SGLang hands over what its tower made of one medium."""
        if mm_hash in self._wanted:
            self._kept[mm_hash] = embedding
            return True
        return bool(super().set(mm_hash, embedding, loc))

    def clear(self) -> None:
        """Forget every embedding; what groups want is kept again when the tower runs again."""
        super().clear()
        self._kept.clear()
