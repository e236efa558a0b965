//! Packing of weights into panels, with symmetric quantization per group.

use crate::{
    Cpu, Dtype, Element, Result, View,
    gemm::{GROUP, PANEL_FEATURES, PackedMatrix, PanelMut, WeightFormat},
    with_dtype,
};
use bytemuck::Pod;
use half::{bf16, f16};

/// Inputs that are packed for all lanes of a panel before the next ones, to stay in cache.
const BLOCK: usize = 512;

/// Packs a checked weight, one panel per task.
pub(in crate::cpu) fn pack(cpu: &Cpu, weight: View<'_>, format: WeightFormat) -> Result<PackedMatrix> {
    let shape = [weight.shape()[0], weight.shape()[1]];
    let mut packed = PackedMatrix::zeroed(format, shape)?;
    if shape[1] == 0 {
        return Ok(packed);
    }
    let rows = |panel: usize| {
        panel * PANEL_FEATURES * shape[1]..shape[0].min((panel + 1) * PANEL_FEATURES) * shape[1]
    };
    cpu.each_row(
        packed.panels_mut(),
        PANEL_FEATURES * shape[1],
        || (),
        |(), panel, to| match format {
            WeightFormat::Float(Dtype::F32) => interleave::<f32>(weight, rows(panel), to.weights),
            WeightFormat::Float(Dtype::F16) => interleave::<f16>(weight, rows(panel), to.weights),
            WeightFormat::Float(_) => interleave::<bf16>(weight, rows(panel), to.weights),
            WeightFormat::Int8 | WeightFormat::Int4 => with_dtype!(weight.dtype(), T => {
                let rows = &weight.as_slice::<T>().unwrap_or_default()[rows(panel)];
                quantize(rows, shape[1], to, format);
            }),
        },
    );
    Ok(packed)
}

/// `to[input][lane] = rows[lane][input]`
fn interleave<T: Element + Pod>(weight: View<'_>, rows: std::ops::Range<usize>, to: &mut [u8]) {
    let (rows, inputs) = (&weight.as_slice::<T>().unwrap_or_default()[rows], weight.shape()[1]);
    let to: &mut [T] = bytemuck::cast_slice_mut(to);
    let (to, _) = to.as_chunks_mut::<PANEL_FEATURES>();
    for (block, to) in to.chunks_mut(BLOCK).enumerate() {
        for (lane, row) in rows.chunks_exact(inputs).enumerate() {
            to.iter_mut().zip(&row[block * BLOCK..]).for_each(|(to, &weight)| to[lane] = weight);
        }
    }
}

/// Rounds each group of a row to integers times a bf16 scale.
fn quantize<T: Element>(rows: &[T], inputs: usize, to: &mut PanelMut<'_>, format: WeightFormat) {
    for (lane, row) in rows.chunks_exact(inputs).enumerate() {
        for (group, weights) in row.chunks(GROUP).enumerate() {
            let mut values = [0.0; GROUP];
            values.iter_mut().zip(weights).for_each(|(value, weight)| *value = weight.to_f32());
            let scale = match format {
                WeightFormat::Int4 => int4_scale(&values),
                _ => int8_scale(&values),
            };
            to.scales[group * PANEL_FEATURES + lane] = scale;
            let scale = scale.to_f32();
            for (i, value) in values[..weights.len()].iter().enumerate() {
                let input = group * GROUP + i;
                // the cast maps NaN of a group without scale to 0
                let integer = (value / scale).round_ties_even();
                let (low, high) = format.integer_range();
                to.set_integer(format, lane, input, integer.clamp(f32::from(low), f32::from(high)) as i8);
            }
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
