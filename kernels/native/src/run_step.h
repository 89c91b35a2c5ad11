#pragma once
#include "step_work.h"
#include "threads.h"

namespace remora::REMORA_LEVEL {

// This rank's part of one step of the model's layers: stores K/V, leaves the logits in work.logits if there is a head,
// and the residual stream in work.hidden.
void run_step(Team& team, const StepWork& work);

}  // namespace remora::REMORA_LEVEL
