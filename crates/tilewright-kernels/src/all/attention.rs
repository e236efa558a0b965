//! Attention kernels: Llama 3 heads on Hopper, and the portable kernels.

use super::{ALL, HOPPER, KernelEntry, entry_with};
use crate::attention::{
    body::{
        Bodies, DeviceLimits, mla,
        mla_wgmma::{self, MlaWgmmaConfig},
        mma::{self, MmaConfig},
        simt,
        wgmma::{self, WgmmaConfig},
    },
    plan_device::{PlanKernel, plan_device},
};
use tilewright::{
    Dtype, HeadDim, Heads, Mask, Problem,
    attention::variant::{Alibi, AttentionSinks, Both, ExpressionVariant, Plain, RotaryEmbedding, SoftCap},
    rope::Rope,
};
use tilewright_ptx::verify::Invalid;

pub(super) fn all() -> Vec<KernelEntry> {
    let plans = PlanKernel::ALL
        .map(|kernel| entry_with(kernel.name().to_owned(), ALL, move |name| plan_device(name, kernel)))
        .into();
    [many_rows(), attentions(), latents(), latents_wgmma(), scalars(), plans].into_iter().flatten().collect()
}

/// Attention with `wgmma`, by head dims, and with hooks.
fn many_rows() -> Vec<KernelEntry> {
    let of = |(qk, vo): (usize, usize), [q, o, kv]: [Dtype; 3], suffix: &str| {
        let dim = if qk == vo { format!("d{qk}") } else { format!("d{qk}_{vo}") };
        let name = format!("attention_wgmma_{dim}_{o}{suffix}");
        let (any_mask, hook) = (suffix == "_any_mask", suffix.to_owned());
        let out = if suffix == "_fp8_to_e4m3" { Dtype::E4m3 } else { o };
        let (entry, config) =
            (name.clone(), WgmmaConfig { q, o, out, kv, head_dim: HeadDim { qk, vo }, any_mask });
        let build = move || {
            let variant = match hook.as_str() {
                "_soft_cap" => capped(&entry)?,
                "_alibi" => recorded(&entry, ExpressionVariant::of(&Alibi::new(32)))?,
                _ => recorded(&entry, ExpressionVariant::of(&Plain))?,
            };
            wgmma::attention(&entry, &config, &variant)
        };
        KernelEntry { name, archs: HOPPER, build: Box::new(build), problem: None, overlap: q == o }
    };
    let (bf16, f16, e4m3) = ([Dtype::Bf16; 3], [Dtype::F16; 3], Dtype::E4m3);
    vec![
        of((128, 128), bf16, ""),
        of((128, 128), bf16, "_soft_cap"),
        of((128, 128), bf16, "_alibi"),
        of((128, 128), bf16, "_any_mask"),
        of((128, 128), [Dtype::Bf16, Dtype::Bf16, e4m3], "_e4m3"),
        of((128, 128), [e4m3, Dtype::Bf16, e4m3], "_fp8"),
        of((128, 128), [e4m3, Dtype::Bf16, e4m3], "_fp8_to_e4m3"),
        of((64, 64), f16, ""),
        of((96, 96), bf16, ""),
        of((192, 128), bf16, ""),
        of((192, 128), bf16, "_any_mask"),
        of((256, 256), bf16, ""),
    ]
}

/// Tensor-core attention from Ampere on, one kernel per shared memory size.
fn attentions() -> Vec<KernelEntry> {
    let of_items = |bodies, (qk, vo): (usize, usize), (qo, kv): (Dtype, Dtype), archs: &'static [u32]| {
        let arch = archs[0];
        let device = DeviceLimits::of_arch(arch);
        let config = MmaConfig { q: qo, o: qo, out: qo, kv, head_dim: HeadDim { qk, vo }, bodies, device };
        let dim = if qk == vo { format!("d{qk}") } else { format!("d{qk}_{vo}") };
        let build = move |name: &str| mma::attention(name, &config);
        let few = if bodies == Bodies::SplitKv { "_few" } else { "" };
        let plain = entry_with(format!("attention_{dim}_{qo}_{kv}{few}_sm{arch}"), archs, build);
        KernelEntry { problem: problem((qo, kv), HeadDim { qk, vo }, false), ..plain }
    };
    let of = |dims, dtypes, archs| of_items(Bodies::Both, dims, dtypes, archs);
    let (bf16, f16) = ((Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F16));
    vec![
        of((128, 128), bf16, &[90, 100]),
        of_items(Bodies::SplitKv, (128, 128), bf16, &[90, 100]),
        of((128, 128), bf16, &[80]),
        of((128, 128), bf16, &[86, 89]),
        of((128, 128), bf16, &[120]),
        of((64, 64), f16, &[90, 100]),
        of((256, 256), bf16, &[90, 100]),
        of((192, 128), bf16, &[90, 100]),
        of((128, 128), (Dtype::Bf16, Dtype::E4m3), &[90, 100]),
        of_items(Bodies::SplitKv, (128, 128), (Dtype::Bf16, Dtype::E4m3), &[90, 100]),
        of((128, 128), (Dtype::Bf16, Dtype::E4m3), &[80]),
        of((64, 64), (Dtype::F16, Dtype::E5m2), &[86, 89]),
        of((256, 256), (Dtype::Bf16, Dtype::I8), &[90, 100]),
    ]
}

/// Latent attention on tensor cores, likewise.
fn latents() -> Vec<KernelEntry> {
    let of_heads = |heads: usize, bodies, dtype: Dtype, archs: &'static [u32]| {
        let (arch, head_dim) = (archs[0], HeadDim { qk: 576, vo: 512 });
        let config = mla::MlaConfig {
            dtype,
            out: dtype,
            head_dim,
            heads,
            bodies,
            device: DeviceLimits::of_arch(arch),
        };
        let few = if bodies == Bodies::SplitKv { "_few" } else { "" };
        let name = format!("attention_latent{heads}_d512_64_{dtype}{few}_sm{arch}");
        let plain = entry_with(name, archs, move |name: &str| mla::attention(name, &config));
        KernelEntry { problem: problem((dtype, dtype), head_dim, true), ..plain }
    };
    let of = |bodies, dtype, archs| of_heads(128, bodies, dtype, archs);
    vec![
        of(Bodies::Both, Dtype::Bf16, &[90, 100]),
        of_heads(32, Bodies::Both, Dtype::Bf16, &[90, 100]),
        of(Bodies::SplitKv, Dtype::Bf16, &[90, 100]),
        of(Bodies::Both, Dtype::Bf16, &[80]),
        of(Bodies::Both, Dtype::Bf16, &[86, 89]),
        of(Bodies::Both, Dtype::F16, &[120]),
    ]
}

/// Latent attention with `wgmma`: one CTA per item, and two.
fn latents_wgmma() -> Vec<KernelEntry> {
    let of = |heads: usize, dtype: Dtype| {
        let head_dim = HeadDim { qk: 576, vo: 512 };
        let config = MlaWgmmaConfig { dtype, out: dtype, head_dim, heads };
        let name = format!("attention_mla_wgmma{heads}_d512_64_{dtype}");
        let plain = entry_with(name, HOPPER, move |name: &str| mla_wgmma::attention(name, &config));
        KernelEntry { problem: problem((dtype, dtype), head_dim, true), ..plain }
    };
    let merges = entry_with("attention_mla_large_merges_d512_64_bf16".to_owned(), HOPPER, |name: &str| {
        let head_dim = HeadDim { qk: 576, vo: 512 };
        mla_wgmma::large_merges(
            name,
            &MlaWgmmaConfig { dtype: Dtype::Bf16, out: Dtype::Bf16, head_dim, heads: 128 },
        )
    });
    vec![of(128, Dtype::Bf16), of(64, Dtype::Bf16), of(64, Dtype::F16), merges]
}

/// Fallback kernels without tensor cores: f32, odd head sizes, odd latent heads, all hooks.
fn scalars() -> Vec<KernelEntry> {
    use Dtype::{Bf16, E5m2, F16, F32};
    let of = |name: &str, dtypes: (Dtype, Dtype), head_dim: (u32, u32), mla, hooked: bool| {
        let (dtype_o, dtype_kv) = dtypes;
        let config = simt::SimtConfig { dtype_q: dtype_o, dtype_o, dtype_kv, head_dim, mla };
        let build = move |name: &str| {
            let variant =
                if hooked { rotated(name)? } else { recorded(name, ExpressionVariant::of(&Plain))? };
            simt::attention(name, config, &variant)
        };
        let dim = HeadDim { qk: head_dim.0 as usize, vo: head_dim.1 as usize };
        let problem = if hooked { None } else { problem(dtypes, dim, mla) };
        KernelEntry { problem, ..entry_with(format!("scalar_{name}"), ALL, build) }
    };
    vec![
        of("f32_d128", (F32, F32), (128, 128), false, false),
        of("f16_e5m2_d33_17", (F16, E5m2), (33, 17), false, false),
        of("bf16_latent_d512_64", (Bf16, Bf16), (576, 512), true, false),
        of("f32_d64_hooks", (F32, F32), (64, 64), false, true),
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
fn rotated(kernel: &str) -> Result<ExpressionVariant, Invalid> {
    let rope = Rope::new(64, 1e4).and_then(|rope| RotaryEmbedding::new(&rope));
    let variant = rope.and_then(|rope| {
        let scores = Both::new(Alibi::new(32), SoftCap::new(50.0)?);
        ExpressionVariant::of(&Both::new(rope, Both::new(scores, AttentionSinks::new(vec![0.0; 32])?)))
    });
    recorded(kernel, variant)
}

fn recorded(
    kernel: &str,
    variant: tilewright::Result<ExpressionVariant>,
) -> Result<ExpressionVariant, Invalid> {
    variant.map_err(|why| Invalid::of(kernel, why.to_string()))
}

/// The soft cap of Gemma 2.
fn capped(kernel: &str) -> Result<ExpressionVariant, Invalid> {
    recorded(kernel, SoftCap::new(50.0).and_then(|cap| ExpressionVariant::of(&cap)))
}
