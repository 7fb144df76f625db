"""The coefficients of the closed form: four that are fitted, and those that are counted, each with its source.

Sizes are bytes.
"""

GB = 1e9

# Fitted on ALST's rows of the published lengths; `python -m benchmarks.closed_form --fit` repeats it.

CONTEXT_BYTES = 2.0 * GB
"""Of a GPU: CUDA's context, cuBLAS's and cuDNN's workspaces."""
COMMUNICATOR_BYTES = 3.5 * GB
"""Of a GPU: NCCL's buffers for each process group, the world and, beside it, a sequence group."""
FRAGMENTATION = 0.10
"""Reserved by the caching allocator beyond what is allocated, as a part of the activations."""
COPIES_IN_FLIGHT = 4
"""Layers' inputs that the allocator cannot reuse yet while offloaded ones are copied to the host and back."""
FITTED = ("CONTEXT_BYTES", "COMMUNICATOR_BYTES", "FRAGMENTATION", "COPIES_IN_FLIGHT")
"""The names of all constants that are fitted."""

# Counted in the code of torch, transformers, flash-attn, DeepSpeed and longctx.

FP32 = 4
"""Of an element in single precision."""
TOKEN_BYTES = 40
"""Of each of a rank's tokens: its number, position and label (int64), and what became of it in fp32 (four numbers)."""
LOG_SUM_EXP_BYTES = FP32
"""Of each query and head: attention's log-sum-exp, which the backward pass needs."""

LOGIT_BYTES = 2 + 3 * FP32
"""Of each element of the logits in bf16: themselves, and in fp32 the log-probabilities and the gradients of these and
of the logits."""
FP32_LOGIT_BYTES = 4 * FP32
"""The same of logits in fp32."""
LOSS_TILES = 3
"""Tiles of logits in fp32 that `longctx.layers.loss` holds at most at a time, their gradient among them."""

NORM_BACKWARD_STEPS = 5
"""Tensors in fp32 that the backward pass of transformers' RMSNorm makes beside its input's gradient."""

ADAMW_BYTES = 3 * FP32
"""Of a trained parameter under ZeRO: an fp32 copy of it, and AdamW's two moments."""
HOST_BUFFERS = 0.5
"""Of ZeRO's states in host memory, what their buffers take besides: DeepSpeed's own allowance in
`estimate_zero3_model_states_mem_needs`."""
NF4_BYTES = 0.5
"""Of a 4-bit weight without its scale (bitsandbytes)."""
NF4_BLOCK = 64
"""4-bit weights that share a scale, which is fp32."""
NESTED_SCALE_BYTES = 1
"""Of a scale that is quantised itself (`use_bnb_nested_quant`)."""

FLASH_QUERY_GRADIENT = FP32
"""Of an element of the queries: FlashAttention's sum of dq in fp32, which it makes in half precision (`dq_accum`)."""
FLASH_3_KEY_VALUE_GRADIENT = 2 * FP32
"""Of an element of the keys: version 3's sums of dk and dv in fp32, where query heads share a key/value head."""
RING_QUERY_GRADIENTS = 2 * FP32
"""Of an element of the queries: a ring's sum of dq over blocks, and the block in hand, in fp32."""
PASSED_ON_GRADIENTS = 8 * FP32
"""Of an element of the keys: dk and dv in fp32 where a gather passes them on from rank to rank, as torch's context
parallelism does: the sum, the block in hand, what is sent and what arrives."""
CHUNKED_KEY_VALUE_GRADIENTS = 2 * FP32
"""Of an element of the keys: the sums of dk and dv in host memory of a sequence-chunked layer."""
