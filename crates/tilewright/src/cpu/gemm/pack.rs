//! Packing of weights into tiles, with symmetric quantization per group.

use crate::{
    Cpu, Dtype, Element, Result, View,
    gemm::{GROUP, PackedMatrix, TILE_FEATURES, TileMut, WeightFormat},
    with_dtype,
};
use bytemuck::Pod;
use half::{bf16, f16};

/// Packs a checked weight, one tile per task.
pub(in crate::cpu) fn pack(cpu: &Cpu, weight: View<'_>, format: WeightFormat) -> Result<PackedMatrix> {
    let shape = [weight.shape()[0], weight.shape()[1]];
    let mut packed = PackedMatrix::zeroed(format, shape)?;
    let tile_weights = TILE_FEATURES * shape[1];
    let rows = |tile: usize| tile * tile_weights..shape[0].min((tile + 1) * TILE_FEATURES) * shape[1];
    cpu.each_row(
        packed.tiles_mut(),
        tile_weights,
        || (),
        |(), tile, to| match format {
            WeightFormat::Float(Dtype::F32) => interleave::<f32>(weight, rows(tile), to),
            WeightFormat::Float(Dtype::F16) => interleave::<f16>(weight, rows(tile), to),
            WeightFormat::Float(_) => interleave::<bf16>(weight, rows(tile), to),
            WeightFormat::Int8 | WeightFormat::Int4 => with_dtype!(weight.dtype(), T => {
                let rows = &weight.as_slice::<T>().unwrap_or_default()[rows(tile)];
                quantize(rows, shape[1], to, format);
            }),
        },
    );
    Ok(packed)
}

/// Copies the rows of a tile, a group of inputs at a time to stay in cache.
fn interleave<T: Element + Pod>(weight: View<'_>, rows: std::ops::Range<usize>, to: &mut TileMut<'_>) {
    let (rows, inputs) = (&weight.as_slice::<T>().unwrap_or_default()[rows], weight.shape()[1]);
    for group in 0..inputs.div_ceil(GROUP) {
        for (feature, row) in rows.chunks_exact(inputs).enumerate() {
            to.set_weights(feature, group, &row[group * GROUP..inputs.min((group + 1) * GROUP)]);
        }
    }
}

/// Rounds each group of a row to integers times a bf16 scale.
fn quantize<T: Element>(rows: &[T], inputs: usize, to: &mut TileMut<'_>, format: WeightFormat) {
    let (low, high) = format.integer_range();
    for (feature, row) in rows.chunks_exact(inputs).enumerate() {
        for (group, weights) in row.chunks(GROUP).enumerate() {
            let (mut values, mut integers) = ([0.0; GROUP], [0; GROUP]);
            values.iter_mut().zip(weights).for_each(|(value, weight)| *value = weight.to_f32());
            let scale = match format {
                WeightFormat::Int4 => int4_scale(&values),
                _ => int8_scale(&values),
            };
            for (integer, value) in integers.iter_mut().zip(values) {
                // the cast maps NaN of a group without scale to 0
                let rounded = (value / scale.to_f32()).round_ties_even();
                *integer = rounded.clamp(f32::from(low), f32::from(high)) as i8;
            }
            to.set_group(feature, group, scale, &integers[..weights.len()]);
        }
    }
}

/// The scale that represents the largest magnitude as 127.
fn int8_scale(values: &[f32]) -> bf16 {
    bf16::from_f32(values.iter().fold(0.0, |max, value| f32::max(max, value.abs())) / 127.0)
}

/// The scale, of either sign, that represents the value of largest magnitude as -8, so that all 16 integers are used.
fn int4_scale(values: &[f32]) -> bf16 {
    let largest =
        values.iter().fold(0.0, |max: f32, &value| if value.abs() > max.abs() { value } else { max });
    bf16::from_f32(largest / -8.0)
}
