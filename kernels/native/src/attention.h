// Paged attention over the arena in place: decode and chunked prefill in one routine.
//
// Row (token, query head) sees positions 0 up to its own. Within a chunk of ATTENTION_CHUNK positions all scores are
// computed, then their maximum, then exp2, then the sum and P·V in token order; chunks merge in ascending order in
// fp32. No step of it depends on which rows share a tile, so that a row has the same bits alone, in a batch, in a
// prompt cut anywhere, and on any number of threads. Slots beyond context_len may hold anything, NaN too.
#pragma once
#include "attention_work.h"
#include "remora.h"

namespace remora::REMORA_LEVEL {

// Query rows per tile that suit this level: what AttentionPlan::prepare wants.
int32_t attention_tile_rows(const Arena& arena);

// Computes items of the plan, claimed by ranks one by one. Needs head_dim in multiples of 16 up to 256, block_tokens in
// multiples of 16 that divide ATTENTION_CHUNK, and K/V of the step stored and visible to all ranks (barrier after
// store_kv). Ends without a barrier, like every kernel; the scratch of the team is overwritten and, on AMX, the thread's
// tiles are released.
void attention(Team& team, const Step& step, const Arena& arena, const AttentionCall& call, const AttentionWork& work);

// Puts the parts of this rank's share of the tokens together, behind a barrier after attention(); then these tokens' rows
// of `out` are whole, and, behind another barrier, all are.
void merge_attention(Team& team, const Step& step, const Arena& arena, const AttentionCall& call,
                     const AttentionWork& work);

}  // namespace remora::REMORA_LEVEL
