//! Elementwise and cache operators of a layer.

use super::{ALL, KernelEntry, entry, entry_with, model_kernels};
use crate::{
    activation::{Activation, ActivationConfig, act_and_mul},
    append::{self, AppendConfig},
    attention::kernel::merge::{self, MergeKind},
    bits,
    elementwise::{self, AddConfig, MapConfig, MapKind},
    norm::{self, NormConfig},
    quantization::{self, GroupQuantizationConfig},
    rope::{self, Angles, RopeConfig},
    rows,
    tile::{RowPartition, chunk},
};
use tilewright::{Dtype, attention::BitOrder, rope::RopeStyle};

pub(super) fn all() -> Vec<KernelEntry> {
    let rounding = [Dtype::Bf16, Dtype::F16].into_iter().flat_map(rounding);
    [layers(Dtype::Bf16), layers(Dtype::F16), norms(), quantized_ropes(), group_quantizations(), others()]
        .into_iter()
        .flatten()
        .chain(rounding)
        .collect()
}

/// Kernels of the serving engine that round f32 products and residuals to `dtype`.
fn rounding(dtype: Dtype) -> Vec<KernelEntry> {
    let (f32, width) = (Dtype::F32, 4);
    let norm_config = norm_of_row([f32, dtype, dtype], width, 4096);
    let rope_config = rope_of((f32, dtype), RopeStyle::Neox, width);
    let activated = |activation| ActivationConfig { activation, dtypes: (f32, dtype), width };
    vec![
        entry(norm_config, NormConfig::name, norm::norm),
        entry(NormConfig { residual: Some(f32), ..norm_config }, NormConfig::name, norm::norm),
        entry(rope_config, RopeConfig::name, rope::rope),
        entry(activated(Activation::Silu), ActivationConfig::name, act_and_mul),
        entry(activated(Activation::GeluTanh), ActivationConfig::name, act_and_mul),
        entry(AddConfig { dtypes: (f32, dtype), width }, AddConfig::name, elementwise::add),
    ]
}

/// Operators of a Llama 3 8B layer beside attention and matrix products, with elements of `dtype`.
fn layers(dtype: Dtype) -> Vec<KernelEntry> {
    // kernels of other layers, or with the code of one of these
    const OTHERS: [&str; 5] =
        ["interleaved_turns", "copy_rows", "append_slots", "append_unchecked", "state_masked"];
    let all = [model_kernels::layers(dtype, &[4096], &[128]), model_kernels::caches(dtype, &[128])];
    let is_other = |entry: &KernelEntry| {
        OTHERS.iter().any(|of| entry.name.contains(of)) || entry.name.ends_with("_e4m3_8")
    };
    all.into_iter().flatten().filter(|entry| !is_other(entry)).collect()
}

/// Rotations of heads in two parts to e4m3.
fn quantized_ropes() -> Vec<KernelEntry> {
    let dtypes = (Dtype::Bf16, Dtype::E4m3);
    let width = chunk::max_width(&[Dtype::Bf16]);
    let of = |style| RopeConfig { split: true, scaled: true, ..rope_of(dtypes, style, width) };
    let all = [RopeStyle::Neox, RopeStyle::Interleaved].map(of);
    all.map(|config| entry(config, RopeConfig::name, rope::rope)).into()
}

/// Quantization with a scale per group: blocks of 128 of all dtypes, powers of two, blocks of 64, and addresses without alignment.
fn group_quantizations() -> Vec<KernelEntry> {
    let config = |dtype: Dtype| GroupQuantizationConfig {
        dtypes: (dtype, Dtype::E4m3),
        group_size: 128,
        power_of_two: false,
        width: chunk::max_width(&[dtype, Dtype::E4m3]),
    };
    let bf16 = config(Dtype::Bf16);
    let all = [
        bf16,
        config(Dtype::F16),
        config(Dtype::F32),
        GroupQuantizationConfig { power_of_two: true, ..bf16 },
        GroupQuantizationConfig { group_size: 64, ..bf16 },
        GroupQuantizationConfig { width: 1, ..bf16 },
    ];
    all.map(|config| entry(config, GroupQuantizationConfig::name, quantization::quantize_groups)).into()
}

/// Layer norms of 4096 elements and of rows that exceed registers, and norms that are quantized to e4m3.
fn norms() -> Vec<KernelEntry> {
    let (bf16, f32, e4m3) = (Dtype::Bf16, Dtype::F32, Dtype::E4m3);
    let norm = |out, weight, bias: Option<Dtype>| {
        let plain = norm_of_row([bf16, out, weight], chunk::max_width(&[bf16, out, weight]), 4096);
        NormConfig { bias, scaled: out == e4m3, ..plain }
    };
    let layer_norm = norm(bf16, f32, Some(f32));
    let all = [
        layer_norm,
        NormConfig { rows: None, ..layer_norm },
        norm(e4m3, f32, Some(f32)),
        norm(e4m3, bf16, None),
        NormConfig { residual: Some(bf16), ..norm(e4m3, bf16, None) },
    ];
    all.map(|config| entry(config, NormConfig::name, norm::norm)).into()
}

/// f32 elements, width 1, rows that exceed registers, and kernels with a single dtype.
fn others() -> Vec<KernelEntry> {
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    let merged = |kind| merge::MergeConfig { dtype: f32, width: 4, rows: row_partition(32), kind };
    let norm = |width, row| {
        let plain = norm_of_row([f32, f32, bf16], width, row);
        NormConfig { residual: Some(f32), in_place: true, ..plain }
    };
    let dynamic = |dtype| append::dynamic::DynamicAppendConfig { dtypes: (bf16, dtype) };
    let slots = |width| AppendConfig {
        dtypes: (bf16, Dtype::I8),
        width,
        slot_mapping: append::SlotMappingKind::Slots,
        scaled: true,
    };
    let copied = |to| rows::CopyRowsConfig { dtypes: (bf16, to), width: chunk::max_width(&[bf16, to]) };
    let mut all = vec![
        entry(merged(MergeKind::Pair), merge::MergeConfig::name, merge::merge),
        entry(merged(MergeKind::MaskedPair), merge::MergeConfig::name, merge::merge),
        entry(merged(MergeKind::Strided), merge::MergeConfig::name, merge::merge),
    ];
    all.extend(
        [norm(4, 4096), norm(1, 100), NormConfig { rows: None, ..norm(4, 4096) }]
            .map(|config| entry(config, NormConfig::name, norm::norm)),
    );
    all.extend([Dtype::E4m3, Dtype::E5m2, Dtype::I8].map(|dtype| {
        entry(dynamic(dtype), append::dynamic::DynamicAppendConfig::name, append::dynamic::append)
    }));
    all.extend([1, 8].map(|width| entry(slots(width), AppendConfig::name, append::append)));
    all.extend([bf16, f32].map(|to| entry(copied(to), rows::CopyRowsConfig::name, rows::copy)));
    let gelu = ActivationConfig { activation: Activation::Gelu, dtypes: (f32, f32), width: 4 };
    all.push(entry(gelu, ActivationConfig::name, act_and_mul));
    let maps = [(MapKind::Scale, bf16), (MapKind::Scale, f32), (MapKind::SoftCap, f32)];
    all.extend(maps.map(|(kind, dtype)| {
        let width = chunk::max_width(&[dtype]);
        entry(MapConfig { kind, dtype, width }, MapConfig::name, elementwise::map)
    }));
    all.push(entry(AddConfig { dtypes: (f32, f32), width: 4 }, AddConfig::name, elementwise::add));
    all.push(entry_with("packbits_little".to_owned(), ALL, |name| bits::packbits(name, BitOrder::Little)));
    all
}

/// A norm of rows of `row` elements, out of place, with dtypes of x, of the result and of the weight.
pub(super) fn norm_of_row([dtype, out, weight]: [Dtype; 3], width: u32, row: u32) -> NormConfig {
    let rows = RowPartition::for_chunks(row / width);
    let (in_place, scaled) = (false, false);
    NormConfig { dtype, out, weight, residual: None, in_place, bias: None, scaled, width, rows }
}

/// RoPE of whole heads by a table.
pub(super) fn rope_of(dtypes: (Dtype, Dtype), style: RopeStyle, width: u32) -> RopeConfig {
    RopeConfig { dtypes, style, angles: Angles::Table, split: false, scaled: false, width }
}

fn row_partition(chunks: u32) -> RowPartition {
    RowPartition::for_chunks(chunks).expect("rows that registers hold")
}
