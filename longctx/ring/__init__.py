"""Ring attention over packed documents: plan and operator."""

from typing import TYPE_CHECKING, Any

from longctx.ring.plan import RingPlan
from longctx.ring.planner import plan_ring

if TYPE_CHECKING:
    from longctx.ring.attention import ring_attention

__all__ = ["RingPlan", "plan_ring", "ring_attention"]


def __getattr__(name: str) -> Any:
    # The operator needs torch and the kernels; the plan, which every stage may import, needs neither.
    if name == "ring_attention":
        from longctx.ring.attention import ring_attention

        return ring_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
