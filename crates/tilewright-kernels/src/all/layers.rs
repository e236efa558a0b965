//! What a layer does beside attention and products.

use super::{ALL, Configured, called, of, plain};
use crate::{
    activation::{Activation, Gated, act_and_mul},
    append::{self, Append},
    attention::merge,
    bits,
    norm::{self, Norm},
    rope::{self, Angles, Rope},
    rows,
    tile::{Rows, chunk},
};
use tilewright::{Dtype, attention::BitOrder, rope::RopeStyle};

pub(super) fn all() -> Vec<Configured> {
    let rounding = [Dtype::Bf16, Dtype::F16].into_iter().flat_map(rounding);
    [layers(Dtype::Bf16), layers(Dtype::F16), others()].into_iter().flatten().chain(rounding).collect()
}

/// What the serving engine rounds to `dtype`: f32 of products and of the residual stream, for what reads 16 bits.
fn rounding(dtype: Dtype) -> Vec<Configured> {
    let (f32, width) = (Dtype::F32, 4);
    let rows = Rows::for_chunks(4096 / width);
    let alone = Norm { dtype: f32, out: dtype, weight: dtype, residual: None, in_place: false, width, rows };
    let turned = Rope { dtypes: (f32, dtype), style: RopeStyle::Neox, angles: Angles::Table, width };
    let gated = Gated { activation: Activation::Silu, dtypes: (f32, dtype), width };
    vec![
        of(alone, Norm::name, norm::norm),
        of(Norm { residual: Some(f32), ..alone }, Norm::name, norm::norm),
        of(turned, Rope::name, rope::rope),
        of(gated, Gated::name, act_and_mul),
    ]
}

/// What a layer of Llama 3 8B does beside attention and products, with elements of `dtype`.
fn layers(dtype: Dtype) -> Vec<Configured> {
    let width = chunk::most(&[dtype]);
    let norm = |residual: Option<Dtype>| Norm {
        dtype,
        out: dtype,
        weight: dtype,
        residual,
        in_place: residual.is_some(),
        width,
        rows: Rows::for_chunks(4096 / width),
    };
    let turned = |style, angles| Rope { dtypes: (dtype, dtype), style, angles, width };
    let merged = |pair| merge::MergeConfig { dtype, width, rows: rows_of(128 / width), pair };
    let to = |cache| Append {
        dtypes: (dtype, cache),
        width: chunk::most(&[dtype, cache]),
        places: append::Kind::Table,
        scaled: dtype != cache,
    };
    let named = |name: &str| format!("{name}_{dtype}");
    let gated = |activation| Gated { activation, dtypes: (dtype, dtype), width };
    vec![
        called(named("rmsnorm"), norm(None), norm::norm),
        called(named("fused_add_rmsnorm"), norm(Some(dtype)), norm::norm),
        called(named("rope"), turned(RopeStyle::Neox, Angles::Table), rope::rope),
        called(named("rope_interleaved"), turned(RopeStyle::Interleaved, Angles::Table), rope::rope),
        called(named("rope_turns"), turned(RopeStyle::Neox, Angles::Turns), rope::rope),
        called(named("silu_and_mul"), gated(Activation::Silu), act_and_mul),
        called(named("gelu_and_mul"), gated(Activation::Gelu), act_and_mul),
        called(named("gelu_tanh_and_mul"), gated(Activation::GeluTanh), act_and_mul),
        called(named("append"), to(dtype), append::append),
        called(named("append_e4m3"), to(Dtype::E4m3), append::append),
        called(named("merge_state"), merged(true), merge::merge),
        called(named("merge_states"), merged(false), merge::merge),
    ]
}

/// Elements of f32, elements one by one, rows that registers do not hold, and what has no other dtypes.
fn others() -> Vec<Configured> {
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    let merged = |pair| merge::MergeConfig { dtype: f32, width: 4, rows: rows_of(32), pair };
    let norm = |width, rows| Norm {
        dtype: f32,
        out: f32,
        weight: bf16,
        residual: Some(f32),
        in_place: true,
        width,
        rows,
    };
    let dynamic = |dtype| append::dynamic::Dynamic { dtypes: (bf16, dtype) };
    let slots =
        |width| Append { dtypes: (bf16, Dtype::I8), width, places: append::Kind::Slots, scaled: true };
    let copied = |to| rows::Copy { dtypes: (bf16, to), width: chunk::most(&[bf16, to]) };
    let mut all = vec![
        called("merge_state_f32".to_owned(), merged(true), merge::merge),
        called("merge_states_f32".to_owned(), merged(false), merge::merge),
    ];
    all.extend(
        [norm(4, Rows::for_chunks(1024)), norm(1, Rows::for_chunks(100)), norm(4, None)]
            .map(|config| of(config, Norm::name, norm::norm)),
    );
    all.extend(
        [Dtype::E4m3, Dtype::E5m2, Dtype::I8]
            .map(|dtype| of(dynamic(dtype), append::dynamic::Dynamic::name, append::dynamic::append)),
    );
    all.extend([1, 8].map(|width| of(slots(width), Append::name, append::append)));
    all.extend([bf16, f32].map(|to| of(copied(to), rows::Copy::name, rows::copy)));
    let gelu = Gated { activation: Activation::Gelu, dtypes: (f32, f32), width: 4 };
    all.push(of(gelu, Gated::name, act_and_mul));
    all.push(plain("packbits_little".to_owned(), ALL, |name| bits::packbits(name, BitOrder::Little)));
    all
}

fn rows_of(chunks: u32) -> Rows {
    Rows::for_chunks(chunks).expect("rows that registers hold")
}
