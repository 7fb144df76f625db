"""Put documents into packs: lengths in, bins out."""

from longctx.data import document_lengths as read_lengths

from .balance import balanced_order, pack_costs, shuffled_order, spread_step
from .bfd import lower_bound
from .cache import load_plan, save_plan
from .dataset import PackedDataset, pack_dataset
from .lanes import add_counts
from .overlong import OVERLONG, PackingReport, plan_packing
from .pairs import PairedDataset, kept_of_sides, lengths_of_pairs, plan_pairs, shared_tokens
from .plan import STRATEGIES, Packing, one_per_bin, pack
from .streaming import PackedStream

__all__ = [
    "OVERLONG",
    "STRATEGIES",
    "PackedDataset",
    "PackedStream",
    "Packing",
    "PackingReport",
    "PairedDataset",
    "add_counts",
    "balanced_order",
    "kept_of_sides",
    "lengths_of_pairs",
    "load_plan",
    "lower_bound",
    "one_per_bin",
    "pack",
    "pack_costs",
    "pack_dataset",
    "plan_packing",
    "plan_pairs",
    "read_lengths",
    "save_plan",
    "shared_tokens",
    "shuffled_order",
    "spread_step",
]
