"""Put documents into packs: lengths in, bins out."""

from longctx.data import document_lengths as read_lengths

from .bfd import lower_bound
from .dataset import PackedDataset, pack_dataset
from .overlong import OVERLONG, PackingReport, plan_packing
from .plan import STRATEGIES, Packing, Piece, one_per_bin, pack

__all__ = [
    "OVERLONG",
    "STRATEGIES",
    "PackedDataset",
    "Packing",
    "PackingReport",
    "Piece",
    "lower_bound",
    "one_per_bin",
    "pack",
    "pack_dataset",
    "plan_packing",
    "read_lengths",
]
