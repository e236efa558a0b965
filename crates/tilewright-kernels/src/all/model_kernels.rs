//! The kernels that engines load for common models: attention in f16 and bf16, with 16-bit caches and e4m3, and the operators around it.

use super::{
    ALL, KernelEntry,
    attention::{self, plain, plans},
    entry, entry_with,
    layers::{norm_of_row, rope_of},
    products, sampling,
};
use crate::{
    activation::{Activation, ActivationConfig, act_and_mul},
    append::{self, AppendConfig, SlotMappingKind},
    attention::{
        body::DeviceLimits,
        kernel::merge::{self, MergeConfig, MergeKind},
        operator::OperatorKernels,
    },
    bits,
    gemm::{Epilogue, GemmKernel, dot::DotConfig, skinny::SkinnyConfig, sm80::Sm80Config, sm90::Sm90Config},
    norm::{self, NormConfig},
    rope::{self, Angles, RopeConfig, append::RopeAppendConfig},
    rows::{self, CopyRowsConfig},
    sampling::{RowCtas, RowKind, SampleConfig, SamplingKernel},
    tile::RowPartition,
};
use std::collections::BTreeSet;
use tilewright::{Dtype, HeadDim, Heads, Problem, attention::BitOrder, rope::RopeStyle};

/// Dtypes of activations, weights and 16-bit caches.
const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];
/// Elements per access of 16 bytes.
const WIDTH: u32 = 8;
/// Head dims of queries and keys, and of values.
const HEAD_DIMS: [(usize, usize); 4] = [(64, 64), (128, 128), (192, 128), (256, 256)];
/// Head dims of norms and merges, and hidden sizes.
const ROWS: [u32; 18] =
    [64, 128, 256, 512, 896, 1024, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 16_384];

/// All of them, each once.
pub(super) fn all() -> Vec<KernelEntry> {
    let of_dtypes = DTYPES.into_iter().flat_map(|dtype| {
        [layers(dtype, &ROWS, &[64, 128]), caches(dtype, &[64, 128, 256, 512]), gemms(dtype)]
            .into_iter()
            .flatten()
    });
    let mut names = BTreeSet::new();
    let all = heads().into_iter().chain(plans()).chain(of_dtypes).chain(samplers()).chain(packbits());
    all.filter(|entry| names.insert(entry.name.clone())).collect()
}

/// Attention of heads and latent attention on each architecture.
fn heads() -> Vec<KernelEntry> {
    let heads = Heads { qo: 32, kv: 8 };
    let mut problems = Vec::new();
    for dtype in DTYPES {
        for (qk, vo) in HEAD_DIMS {
            let of = |kv| Problem::builder(heads, HeadDim { qk, vo }).dtypes(dtype, kv).build();
            problems.extend([of(dtype), of(Dtype::E4m3)]);
        }
        // the number of heads determines the rows of a tile
        let latent = |heads, kv| Problem::latent(heads, 512, 64).scale(0.1).dtypes(dtype, kv).build();
        problems.extend([16, 32, 128].map(|heads| latent(heads, dtype)));
        problems.extend([16, 128].map(|heads| latent(heads, Dtype::E4m3)));
    }
    let variant = plain();
    let of_arch = |&arch: &u32| {
        let device = DeviceLimits::of_arch(arch);
        let kernels = |problem| OperatorKernels::new(problem, &variant, device).all();
        problems.iter().flatten().flat_map(kernels).collect::<Vec<_>>()
    };
    ALL.iter().flat_map(of_arch).map(|kernel| attention::entry_of(kernel, plain())).collect()
}

/// Norms of rows of these lengths, activations, RoPE, with appends of heads of `dims`, and copies of rows.
pub(super) fn layers(dtype: Dtype, rows: &[u32], dims: &[u32]) -> Vec<KernelEntry> {
    let norm = |residual: Option<Dtype>, row: u32| {
        let plain = norm_of_row([dtype; 3], WIDTH, row);
        NormConfig { residual, in_place: residual.is_some(), ..plain }
    };
    let rope = |style, angles| RopeConfig { angles, ..rope_of((dtype, dtype), style, WIDTH) };
    let activation = |activation| ActivationConfig { activation, dtypes: (dtype, dtype), width: WIDTH };
    let rope_append = |norms, dim| RopeAppendConfig { dtypes: (Dtype::F32, dtype), norms, dim };
    let norms = [None, Some(dtype)].into_iter().flat_map(|of| rows.iter().map(move |&row| norm(of, row)));
    let ropes = [RopeStyle::Neox, RopeStyle::Interleaved]
        .into_iter()
        .flat_map(|style| [Angles::Table, Angles::Turns].map(|angles| rope(style, angles)));
    let rope_appends = [None, Some(dtype)]
        .into_iter()
        .flat_map(|norms| dims.iter().map(move |&dim| rope_append(norms, dim)));
    let copied = CopyRowsConfig { dtypes: (dtype, dtype), width: WIDTH };
    norms
        .map(|config| entry(config, NormConfig::name, norm::norm))
        .chain(ropes.map(|config| entry(config, RopeConfig::name, rope::rope)))
        .chain(rope_appends.map(|config| entry(config, RopeAppendConfig::name, rope::append::rope_append)))
        .chain(
            [Activation::Silu, Activation::Gelu, Activation::GeluTanh]
                .map(|of| entry(activation(of), ActivationConfig::name, act_and_mul)),
        )
        .chain([entry(copied, CopyRowsConfig::name, rows::copy)])
        .collect()
}

/// Appends to caches, and merges of attention states of these head dims.
pub(super) fn caches(dtype: Dtype, dims: &[u32]) -> Vec<KernelEntry> {
    let append = |slot_mapping, (cache, scaled)| AppendConfig {
        dtypes: (dtype, cache),
        width: WIDTH,
        slot_mapping,
        scaled,
    };
    let appends = [SlotMappingKind::Slots, SlotMappingKind::Unchecked, SlotMappingKind::Numbers]
        .into_iter()
        .flat_map(|slots| {
            [(dtype, false), (Dtype::E4m3, false), (Dtype::E4m3, true)].map(|cache| append(slots, cache))
        });
    let merge = |kind, dim: u32| {
        Some(MergeConfig { dtype, width: WIDTH, rows: RowPartition::for_chunks(dim / WIDTH)?, kind })
    };
    let merges = [MergeKind::Pair, MergeKind::MaskedPair, MergeKind::Strided]
        .into_iter()
        .flat_map(|kind| dims.iter().map(move |&dim| merge(kind, dim)));
    appends
        .map(|config| entry(config, AppendConfig::name, append::append))
        .chain(merges.flatten().map(|config| entry(config, MergeConfig::name, merge::merge)))
        .collect()
}

/// Products of activations and weights of one dtype, with and without a bias, and of segments of rows.
fn gemms(dtype: Dtype) -> Vec<KernelEntry> {
    let of = |bias, grouped| {
        let epilogue = Epilogue { bias, out: dtype, paired: true, grouped };
        let (x, weight, elements) = (dtype, dtype, dtype);
        let tiles = [false, true].map(|large| GemmKernel::Sm80(Sm80Config { elements, large, epilogue }));
        if grouped {
            return tiles.to_vec();
        }
        let dots =
            [1, 2, 4].map(|rows| GemmKernel::Dot(DotConfig { x, weight, width: WIDTH, rows, epilogue }));
        let skinny = [8, 16, 32].into_iter().flat_map(|rows| {
            [8, 16].map(|warps| GemmKernel::Skinny(SkinnyConfig { elements, warps, rows, epilogue }))
        });
        let hopper =
            [128, 256].map(|tile_columns| GemmKernel::Sm90(Sm90Config { elements, tile_columns, epilogue }));
        dots.into_iter().chain(skinny).chain(tiles).chain(hopper).collect()
    };
    [of(None, false), of(Some(dtype), false), of(None, true)]
        .into_iter()
        .flatten()
        .map(products::entry_of)
        .collect()
}

/// Samplers of large vocabularies.
fn samplers() -> Vec<KernelEntry> {
    use SamplingKernel as K;
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    let config = |kind, threads| SampleConfig { kind, threads };
    let rows = [(1, 1024), (1, 512), (2, 512), (8, 256)].map(|(ctas, threads)| RowCtas { ctas, threads });
    let (logits, probs) = (RowKind::Logits, RowKind::Probs);
    let samples = [(logits, f32), (logits, bf16), (probs, f32)]
        .into_iter()
        .flat_map(|(kind, dtype)| rows.map(|row| K::Sample(kind, dtype, row)));
    let of_dtypes = [f32, bf16].into_iter().flat_map(|dtype| {
        [
            K::Distribution(config(logits, 1024), [dtype, dtype]),
            K::TopK(dtype, 512),
            K::TopKMask(dtype, 512),
            K::Logprobs(dtype, 512),
            K::MaskTokens(dtype),
            K::Penalise(dtype),
            K::AddBias(dtype),
        ]
    });
    let of_probs =
        [K::Distribution(config(probs, 1024), [f32, f32]), K::Chain(config(probs, 512), [f32, f32])];
    samples.chain(of_dtypes).chain(of_probs).map(sampling::entry_of).collect()
}

fn packbits() -> Vec<KernelEntry> {
    let of = |(name, order): (&str, BitOrder)| {
        entry_with(name.to_owned(), ALL, move |name| bits::packbits(name, order))
    };
    [("packbits_little", BitOrder::Little), ("packbits_big", BitOrder::Big)].map(of).into()
}
