//! Every kernel in every configuration that is assembled, measured and compared with what it was.
//!
//! The list is for whoever judges kernels: a kernel that is not here is not tested. Names are unique, and are those of the PTX
//! entries.

use crate::{
    activation::{Activation, Gated, act_and_mul},
    append::{Append, append},
    attention::{
        merge::{Merge, merge_state, merge_states},
        prefill_sm90::{Prefill, prefill},
        tensor_core::{Config, Device, attention},
    },
    gemm::{sm80, sm90},
    norm::{Norm, fused_add_rmsnorm, rmsnorm},
    rope::{Rope, Style, rope},
    softmax::{Softmax, softmax},
    tile::Packed,
};
use half::{bf16, f16};
use std::fmt;
use tilewright::{
    Dtype, HeadDim,
    attention::variant::{ExpressionVariant, SoftCap},
};
use tilewright_ptx::{
    ir::Kernel,
    text::{ptx, without_source_lines},
    verify::Invalid,
};

/// Architectures with `wgmma`: its instructions are for `sm_90a` alone.
const HOPPER: &[u32] = &[90];

/// What needs nothing newer than Ampere.
const ALL: &[u32] = &[80, 86, 89, 90, 100, 120];

/// Records a kernel, the same one each time.
type Build = Box<dyn Fn() -> Result<Kernel, Invalid> + Send + Sync>;

/// A kernel in one configuration.
pub struct Configured {
    /// Its name, such as `prefill_sm90_d128_causal`; unique.
    pub name: String,
    /// The architectures that it is for, as in `sm_90`: some of 80, 86, 89, 90, 100, 120.
    pub archs: &'static [u32],
    /// Records it.
    pub build: Build,
    /// Whether it promises that in its main loop the softmax of a tile runs beside the product of another: its exponentials
    /// lie between the wait for the one product and that for the other.
    pub overlap: bool,
}

impl fmt::Debug for Configured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Configured")
            .field("name", &self.name)
            .field("archs", &self.archs)
            .field("overlap", &self.overlap)
            .finish_non_exhaustive()
    }
}

/// All of them, in a fixed order.
pub fn all() -> Vec<Configured> {
    let lists =
        [prefills(), attentions(), products(), layers::<bf16>("bf16"), layers::<f16>("f16"), others()];
    lists.into_iter().flatten().collect()
}

/// Those whose text is kept in `golden/`, word for word: few, since a line that changes in all kernels changes all files.
const GOLDEN: [&str; 4] = ["prefill_sm90_d128", "gemm_sm80", "rmsnorm_bf16", "merge_state_f32"];

/// The golden files, each with its name and what it has to be: PTX for the first architecture, without lines of the source.
///
/// # Errors
/// When a kernel cannot be recorded or printed.
pub fn golden_texts() -> Result<Vec<(String, String)>, Invalid> {
    let text = |configured: &Configured| {
        let arch = configured.archs.first().copied().unwrap_or_default();
        let text = ptx(&(configured.build)()?, arch)?;
        Ok((format!("{}.ptx", configured.name), without_source_lines(&text)))
    };
    all().iter().filter(|configured| GOLDEN.contains(&configured.name.as_str())).map(text).collect()
}

/// Llama 3's heads of 128, with every way to see keys and with a hook.
fn prefills() -> Vec<Configured> {
    let heads = (32, 8);
    let of = |suffix: &str, causal: bool, soft_cap: bool| {
        let name = format!("prefill_sm90_d128{suffix}");
        let entry = name.clone();
        let build = move || {
            let variant = if soft_cap { Some(capped(&entry)?) } else { None };
            prefill(&entry, Prefill { heads, causal }, variant.as_ref())
        };
        Configured { name, archs: HOPPER, build: Box::new(build), overlap: true }
    };
    vec![of("", false, false), of("_causal", true, false), of("_causal_soft_cap", true, true)]
}

/// Attention on tensor cores from Ampere on.
fn attentions() -> Vec<Configured> {
    let of = |(qk, vo): (usize, usize), (qo, kv): (Dtype, Dtype), archs: &'static [u32]| {
        let arch = archs[0];
        let config = Config { qo, kv, head_dim: HeadDim { qk, vo }, device: Device::of_arch(arch) };
        let dim = if qk == vo { format!("d{qk}") } else { format!("d{qk}_{vo}") };
        plain(format!("attention_{dim}_{qo}_{kv}_sm{arch}"), archs, move |name| attention(name, &config))
    };
    let (bf16, f16) = ((Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F16));
    vec![
        of((128, 128), bf16, HOPPER),
        of((128, 128), bf16, &[80]),
        of((128, 128), bf16, &[86, 89]),
        of((64, 64), f16, HOPPER),
        of((256, 256), bf16, HOPPER),
        of((192, 128), bf16, HOPPER),
    ]
}

/// The soft cap of Gemma 2.
fn capped(kernel: &str) -> Result<ExpressionVariant, Invalid> {
    let variant = SoftCap::new(50.0).and_then(|cap| ExpressionVariant::of(&cap));
    variant.map_err(|why| Invalid::of(kernel, why.to_string()))
}

/// A kernel without overlap, by a function of its name.
fn plain(
    name: String,
    archs: &'static [u32],
    build: impl Fn(&str) -> Result<Kernel, Invalid> + Send + Sync + 'static,
) -> Configured {
    let entry = name.clone();
    Configured { name, archs, build: Box::new(move || build(&entry)), overlap: false }
}

fn products() -> Vec<Configured> {
    let sm90 = |tile_columns: usize| {
        let config = sm90::Gemm { tile_columns };
        plain(format!("gemm_sm90_128x{tile_columns}"), HOPPER, move |name| sm90::gemm(name, config))
    };
    vec![plain("gemm_sm80".to_owned(), ALL, sm80::gemm), sm90(128), sm90(256)]
}

/// What a layer of Llama 3 8B does beside attention and products, with elements `T`.
fn layers<T: Packed>(elements: &str) -> Vec<Configured> {
    let norm = |weight_plus_one| Norm { hidden: 4096, weight_plus_one };
    let turned = |style, in_place| Rope { heads: (32, 8), head_dim: 128, rotary_dim: 128, style, in_place };
    let gated = |activation| Gated { activation, d: 14336 };
    let appended = Append { kv_heads: 8, head_dims: (128, 128), page_size: 16 };
    let merged = Merge { head_dim: 128 };
    let named = |name: &str| format!("{name}_{elements}");
    vec![
        plain(named("rmsnorm"), ALL, move |name| rmsnorm::<T>(name, norm(false))),
        plain(named("rmsnorm_gemma"), ALL, move |name| rmsnorm::<T>(name, norm(true))),
        plain(named("fused_add_rmsnorm"), ALL, move |name| fused_add_rmsnorm::<T>(name, norm(false))),
        plain(named("rope"), ALL, move |name| rope::<T>(name, turned(Style::Halves, false))),
        plain(named("rope_in_place"), ALL, move |name| rope::<T>(name, turned(Style::Halves, true))),
        plain(named("rope_interleaved"), ALL, move |name| rope::<T>(name, turned(Style::Interleaved, false))),
        plain(named("silu_and_mul"), ALL, move |name| act_and_mul::<T>(name, gated(Activation::Silu))),
        plain(named("gelu_and_mul"), ALL, move |name| act_and_mul::<T>(name, gated(Activation::Gelu))),
        plain(named("gelu_tanh_and_mul"), ALL, move |name| {
            act_and_mul::<T>(name, gated(Activation::GeluTanh))
        }),
        plain(named("append"), ALL, move |name| append::<T>(name, appended)),
        plain(named("merge_state"), ALL, move |name| merge_state::<T>(name, merged)),
        plain(named("merge_states"), ALL, move |name| merge_states::<T>(name, merged)),
    ]
}

fn others() -> Vec<Configured> {
    let merged = Merge { head_dim: 128 };
    vec![
        plain("merge_state_f32".to_owned(), ALL, move |name| merge_state::<f32>(name, merged)),
        plain("merge_states_f32".to_owned(), ALL, move |name| merge_states::<f32>(name, merged)),
        plain("softmax_128256".to_owned(), ALL, |name| softmax(name, Softmax { vocab: 128_256 })),
    ]
}

#[cfg(test)]
mod tests {
    use super::{GOLDEN, all, golden_texts};
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_those_of_the_entries() {
        let all = all();
        let names: BTreeSet<&str> = all.iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for kernel in &all {
            assert_eq!((kernel.build)().unwrap().name, kernel.name);
        }
    }

    #[test]
    fn every_kernel_has_ptx_for_each_of_its_architectures() {
        for kernel in all() {
            assert!(!kernel.archs.is_empty(), "{kernel:?} is for nothing");
            let built = (kernel.build)().unwrap();
            for &arch in kernel.archs {
                super::ptx(&built, arch).unwrap();
            }
        }
    }

    #[test]
    fn every_golden_name_is_that_of_a_kernel() {
        let texts = golden_texts().unwrap();
        let names: Vec<&str> = texts.iter().map(|(file, _)| file.trim_end_matches(".ptx")).collect();
        assert_eq!(names, GOLDEN);
    }
}
