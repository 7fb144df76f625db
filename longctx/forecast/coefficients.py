"""The coefficients of the closed form: four that are fitted, and those that are counted, each with its source.

Sizes are bytes.
"""

GB = 1e9

# Fitted to ALST's rows of the published lengths; `python -m benchmarks.closed_form --fit` repeats the fit.

CONTEXT_BYTES = 2.0 * GB
"""On each GPU: CUDA's context, and the workspaces of cuBLAS and cuDNN."""
COMMUNICATOR_BYTES = 3.5 * GB
"""On each GPU, for each process group: NCCL's buffers. The world is one group, and a sequence group another."""
FRAGMENTATION = 0.10
"""Memory that the caching allocator reserves beyond what is allocated, as a fraction of the activations."""
COPIES_IN_FLIGHT = 4
"""How many layers' inputs the allocator cannot reuse yet, while offloaded ones are copied to the host and back."""
FITTED = ("CONTEXT_BYTES", "COMMUNICATOR_BYTES", "FRAGMENTATION", "COPIES_IN_FLIGHT")
"""The names of all constants that are fitted."""

# Counted in the code of torch, transformers, flash-attn, DeepSpeed and longctx.

FP32 = 4
"""For each element in single precision."""
TOKEN_BYTES = 40
"""For each token of a rank: its number, position and label (int64), and four results of the loss (fp32)."""
LOG_SUM_EXP_BYTES = FP32
"""For each query and head: attention's log-sum-exp, which the backward pass needs."""

LOGIT_BYTES = 2 + 3 * FP32
"""For each element of bf16 logits: the logit, and in fp32 its log-probability and the gradients of both."""
FP32_LOGIT_BYTES = 4 * FP32
"""The same for logits in fp32."""
LOSS_TILES = 3
"""Most tiles of fp32 logits that `longctx.layers.loss` holds at a time, their gradient included."""

NORM_BACKWARD_STEPS = 5
"""fp32 tensors that the backward pass of transformers' RMSNorm makes besides its input's gradient."""

ADAMW_STATE_BYTES = 3 * FP32
"""For each trained parameter under ZeRO: an fp32 copy of it, and AdamW's two moments."""
HOST_BUFFERS = 0.5
"""ZeRO's buffers in host memory, as a fraction of its states there: DeepSpeed's own allowance in
`estimate_zero3_model_states_mem_needs`."""
NF4_BYTES = 0.5
"""For each 4-bit weight, without its scale (bitsandbytes)."""
NF4_BLOCK = 64
"""Number of 4-bit weights that share a scale, which is fp32."""
NESTED_SCALE_BYTES = 1
"""For each scale that is quantised itself (`use_bnb_nested_quant`)."""

FLASH_QUERY_GRADIENT = FP32
"""For each element of the queries: the fp32 sum of dq that FlashAttention makes in half precision (`dq_accum`)."""
FLASH_3_KEY_VALUE_GRADIENT = 2 * FP32
"""For each element of the keys: version 3's fp32 sums of dk and dv, if query heads share a key/value head."""
RING_QUERY_GRADIENTS = 2 * FP32
"""For each element of the queries: a ring's fp32 sum of dq over blocks, and dq of the current block."""
PASSED_ON_GRADIENTS = 8 * FP32
"""For each element of the keys: dk and dv in fp32 if a gather passes them on from rank to rank, as torch's context
parallelism does: the sum, the current block's, those being sent and those arriving."""
