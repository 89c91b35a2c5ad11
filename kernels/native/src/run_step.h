#pragma once
#include "step_work.h"
#include "threads.h"

namespace remora::REMORA_LEVEL {

// This rank's part of one step of the whole model: stores K/V, leaves the logits in work.logits.
void run_step(Team& team, const StepWork& work);

}  // namespace remora::REMORA_LEVEL
