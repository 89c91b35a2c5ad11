// Linear layers with int8 or int4 weights in groups of INPUT_GROUP inputs. Called by linear.cpp alone. Level header.
//
// Activations are int16 with a scale for each group: 15 bits of it cost what 7 bits would where products are made of
// 16-bit pairs, and no accuracy. On AMX, whose tiles take int8 or bf16, the weights are widened to bf16 panel by panel.
#pragma once
#include "linear.h"

namespace remora::REMORA_LEVEL {

// A row as int16, and for each group its scale and the scaled sum of its values. A group with a NaN or an infinity gets
// the scale NaN. Columns up to the padded width are left alone.
void encode_int16(const float* x, int64_t num_in, uint8_t* out, float* scales);

// This rank's panels of linear(), for every output kind but silu_encoded.
void linear_grouped(const PackedLinear& weights, const Activations& activations, int64_t num_rows,
                    const LinearOutput& output, Range panels);

// A panel as bf16 weights in the order of packing.h: 2 * PANEL_COLUMNS * padded_in bytes.
void widen_panel(const PackedLinear& weights, int64_t panel, uint8_t* out);

}  // namespace remora::REMORA_LEVEL
