#include "attention.h"
#include "kv_store.h"
#include "levels.h"
#include "rows.h"
#include "run_step.h"

namespace remora::REMORA_LEVEL {

extern const LevelKernels level_kernels;
const LevelKernels level_kernels = {
    Level::REMORA_LEVEL, activation_stride, attention_tile_rows, run_step,   encode_row,
    linear,              rms_norm_row,      rope_head,           argmax_row, log_sum_exp_row,
    weigh_row,           store_kv,          reencode_blocks,   attention,  merge_attention,
};

}  // namespace remora::REMORA_LEVEL
