//! Attention kernels: Llama 3 heads on Hopper, and the portable kernels.

use super::{ALL, KernelEntry, entry_with, only};
use crate::attention::{
    body::{
        Bodies, DeviceLimits, mla::MlaConfig, mla_wgmma::MlaWgmmaConfig, mma::MmaConfig, simt::SimtConfig,
        wgmma::WgmmaConfig,
    },
    choose::KernelConfig,
    operator::AttentionKernel,
    plan_device::{PlanKernel, plan_device},
};
use tilewright::{
    Dtype, HeadDim, Heads, Mask, Problem,
    attention::variant::{Alibi, AttentionSinks, Both, ExpressionVariant, Plain, RotaryEmbedding, SoftCap},
    rope::Rope,
};

/// DeepSeek models.
const LATENT: HeadDim = HeadDim { qk: 576, vo: 512 };

pub(super) fn all() -> Vec<KernelEntry> {
    [many_rows(), attentions(), latents(), latents_wgmma(), scalars(), plans()]
        .into_iter()
        .flatten()
        .collect()
}

/// The planners on the device.
pub(super) fn plans() -> Vec<KernelEntry> {
    PlanKernel::ALL
        .map(|kernel| entry_with(kernel.name().to_owned(), ALL, move |name| plan_device(name, kernel)))
        .into()
}

/// The entry of a kernel for its architectures.
pub(super) fn entry_of(kernel: AttentionKernel, variant: ExpressionVariant) -> KernelEntry {
    let overlap = matches!(kernel, AttentionKernel::Runs(config) if config.q == config.o);
    let (name, archs) = (kernel.name(&variant), kernel.arch().map_or(ALL, only));
    KernelEntry { overlap, ..entry_with(name, archs, move |name| kernel.record(name, &variant)) }
}

/// The variant without hooks.
pub(super) fn plain() -> ExpressionVariant {
    recorded(ExpressionVariant::of(&Plain))
}

/// Attention with `wgmma`, by head dims, and with hooks.
fn many_rows() -> Vec<KernelEntry> {
    let config = |(qk, vo): (usize, usize), [q, o, kv]: [Dtype; 3]| WgmmaConfig {
        q,
        o,
        out: o,
        kv,
        head_dim: HeadDim { qk, vo },
        any_mask: false,
        pairs: false,
    };
    let (bf16, f16, e4m3) = ([Dtype::Bf16; 3], [Dtype::F16; 3], Dtype::E4m3);
    let (llama, deepseek) = (config((128, 128), bf16), config((192, 128), bf16));
    let fp8 = config((128, 128), [e4m3, Dtype::Bf16, e4m3]);
    let any_mask = |config| WgmmaConfig { any_mask: true, ..config };
    let pairs = |config| WgmmaConfig { pairs: true, ..config };
    let of = |config| entry_of(AttentionKernel::Runs(config), plain());
    let hooked = |variant| entry_of(AttentionKernel::Runs(llama), recorded(variant));
    vec![
        of(llama),
        hooked(SoftCap::new(50.0).and_then(|cap| ExpressionVariant::of(&cap))),
        hooked(ExpressionVariant::of(&Alibi::new(32))),
        of(any_mask(llama)),
        of(config((128, 128), [Dtype::Bf16, Dtype::Bf16, e4m3])),
        of(fp8),
        of(WgmmaConfig { out: e4m3, ..fp8 }),
        of(config((64, 64), f16)),
        of(config((96, 96), bf16)),
        of(deepseek),
        of(any_mask(deepseek)),
        of(config((256, 256), bf16)),
        of(pairs(llama)),
        of(pairs(deepseek)),
        of(pairs(config((256, 256), bf16))),
        entry_of(AttentionKernel::LevelMerges(llama), plain()),
        entry_of(AttentionKernel::LevelMerges(deepseek), plain()),
    ]
}

/// Tensor-core attention from Ampere on, one kernel per architecture.
fn attentions() -> Vec<KernelEntry> {
    let of_items = |bodies, (qk, vo): (usize, usize), (qo, kv): (Dtype, Dtype), archs: &[u32]| {
        let head_dim = HeadDim { qk, vo };
        let config = move |arch| {
            let device = DeviceLimits::of_arch(arch);
            KernelConfig::Mma(MmaConfig { q: qo, o: qo, out: qo, kv, head_dim, bodies, device })
        };
        of_archs(config, problem((qo, kv), head_dim, false), archs)
    };
    let of = |dims, dtypes, archs| of_items(Bodies::Both, dims, dtypes, archs);
    let (bf16, f16) = ((Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F16));
    let e4m3 = (Dtype::Bf16, Dtype::E4m3);
    [
        of((128, 128), bf16, ALL),
        of_items(Bodies::SplitKv, (128, 128), bf16, &[90, 100]),
        of_items(Bodies::SplitKvBoxes, (128, 128), bf16, &[90]),
        of_items(Bodies::SplitKvBoxes, (64, 64), f16, &[90]),
        of_items(Bodies::SplitKvBoxes, (192, 128), bf16, &[90]),
        of_items(Bodies::SplitKvBoxes, (256, 256), bf16, &[90]),
        of_items(Bodies::SplitKvRows, (128, 128), bf16, &[90]),
        of_items(Bodies::SplitKvPairs, (128, 128), bf16, &[80, 89, 90, 100, 120]),
        of_items(Bodies::SplitKvPairs, (64, 64), bf16, &[80, 120]),
        of_items(Bodies::SplitKvPairs, (192, 128), bf16, &[80, 100]),
        of_items(Bodies::SplitKvPairs, (128, 128), e4m3, &[80, 89, 120]),
        of((64, 64), f16, &[90, 100]),
        of((256, 256), bf16, &[90, 100]),
        of((192, 128), bf16, &[90, 100]),
        of((128, 128), e4m3, &[80, 90, 100]),
        of_items(Bodies::SplitKv, (128, 128), e4m3, &[90, 100]),
        of((64, 64), (Dtype::F16, Dtype::E5m2), &[86, 89]),
        of((256, 256), (Dtype::Bf16, Dtype::I8), &[90, 100]),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Latent attention on tensor cores, likewise.
fn latents() -> Vec<KernelEntry> {
    let of_heads = |heads: usize, bodies, dtype: Dtype, archs: &[u32]| {
        let config = move |arch| {
            let device = DeviceLimits::of_arch(arch);
            KernelConfig::Mla(MlaConfig { dtype, out: dtype, head_dim: LATENT, heads, bodies, device })
        };
        of_archs(config, problem((dtype, dtype), LATENT, true), archs)
    };
    let of = |bodies, dtype, archs| of_heads(128, bodies, dtype, archs);
    [
        of(Bodies::Both, Dtype::Bf16, &[80, 86, 89, 90, 100]),
        of_heads(32, Bodies::Both, Dtype::Bf16, &[90, 100]),
        of(Bodies::SplitKv, Dtype::Bf16, &[90, 100]),
        of(Bodies::Both, Dtype::F16, &[120]),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A kernel of items for each architecture.
fn of_archs(
    config: impl Fn(u32) -> KernelConfig,
    problem: Option<Problem>,
    archs: &[u32],
) -> Vec<KernelEntry> {
    let entry = |&arch| KernelEntry { problem, ..entry_of(AttentionKernel::Items(config(arch)), plain()) };
    archs.iter().map(entry).collect()
}

/// Latent attention with `wgmma`: one CTA per item, and two.
fn latents_wgmma() -> Vec<KernelEntry> {
    use Dtype::{Bf16, E4m3, F16};
    let config = |heads, (dtype, kv)| MlaWgmmaConfig { dtype, kv, out: dtype, head_dim: LATENT, heads };
    let of = |heads: usize, dtypes: (Dtype, Dtype)| {
        let kernel = AttentionKernel::Items(KernelConfig::MlaWgmma(config(heads, dtypes)));
        KernelEntry { problem: problem(dtypes, LATENT, true), ..entry_of(kernel, plain()) }
    };
    let merges = entry_of(AttentionKernel::LargeMerges(config(128, (Bf16, Bf16))), plain());
    let of_bytes = [64, 128].map(|heads| of(heads, (Bf16, E4m3)));
    [of(128, (Bf16, Bf16)), of(64, (Bf16, Bf16)), of(64, (F16, F16)), merges]
        .into_iter()
        .chain(of_bytes)
        .collect()
}

/// Fallback kernels without tensor cores: f32, odd head sizes, odd latent heads, all hooks.
fn scalars() -> Vec<KernelEntry> {
    use Dtype::{Bf16, E5m2, F16, F32};
    let of = |dtypes: (Dtype, Dtype), head_dim, mla, variant| {
        let (dtype_o, dtype_kv) = dtypes;
        let config = SimtConfig { dtype_q: dtype_o, dtype_o, dtype_kv, head_dim, mla };
        entry_of(AttentionKernel::Items(KernelConfig::Simt(config)), variant)
    };
    let of_problem = |dtypes, dim, mla| KernelEntry {
        problem: problem(dtypes, dim, mla),
        ..of(dtypes, dim, mla, plain())
    };
    vec![
        of_problem((F32, F32), HeadDim::same(128), false),
        of_problem((F16, E5m2), HeadDim { qk: 33, vo: 17 }, false),
        of_problem((Bf16, Bf16), HeadDim { qk: 576, vo: 512 }, true),
        of((F32, F32), HeadDim::same(64), false, rotated()),
    ]
}

/// Representative problem: Llama 3 heads, or DeepSeek heads for latent attention.
fn problem(dtypes: (Dtype, Dtype), dim: HeadDim, mla: bool) -> Option<Problem> {
    let builder = match mla {
        true => Problem::latent(128, dim.vo, dim.qk - dim.vo).scale(1.0 / 192_f32.sqrt()),
        false => Problem::builder(Heads { qo: 32, kv: 8 }, dim),
    };
    builder.dtypes(dtypes.0, dtypes.1).mask(Mask::Causal).build().ok()
}

/// Rotation, ALiBi, soft cap and attention sinks for 32 heads.
fn rotated() -> ExpressionVariant {
    let rope = Rope::new(64, 1e4).and_then(|rope| RotaryEmbedding::new(&rope));
    let variant = rope.and_then(|rope| {
        let scores = Both::new(Alibi::new(32), SoftCap::new(50.0)?);
        ExpressionVariant::of(&Both::new(rope, Both::new(scores, AttentionSinks::new(vec![0.0; 32])?)))
    });
    recorded(variant)
}

fn recorded(variant: tilewright::Result<ExpressionVariant>) -> ExpressionVariant {
    variant.expect("a variant of the engine")
}
