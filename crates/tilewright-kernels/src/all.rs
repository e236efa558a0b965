//! Every kernel in every configuration that is assembled, measured and compared with what it was.
//!
//! The list is for whoever judges kernels: a kernel that is not here is not tested. Names are unique, and are those of the PTX
//! entries.

use crate::{
    activation::{Activation, Gated, act_and_mul},
    append::{self, Append},
    attention::{
        merge,
        prefill_sm90::{Prefill, prefill},
    },
    bits,
    gemm::{Choice, Ends, dot, skinny, sm80, sm90, tiles},
    norm::{self, Norm},
    rope::{self, Angles, Rope},
    rows,
    sampling::{self, Kind, Sample},
    softmax::{Softmax, softmax},
    tile::{Rows, chunk},
};
use half::{bf16, f16};
use std::fmt;
use tilewright::{
    Dtype,
    attention::{
        BitOrder,
        variant::{ExpressionVariant, SoftCap},
    },
    rope::RopeStyle,
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
    let lists = [prefills(), products(), layers(Dtype::Bf16), layers(Dtype::F16), samplers(), others()];
    lists.into_iter().flatten().collect()
}

/// Those whose text is kept in `golden/`, word for word: few, since a line that changes in all kernels changes all files.
const GOLDEN: [&str; 4] = [
    "prefill_sm90_d128",
    "gemm_sm80_128_bf16_bf16_pairs",
    "rmsnorm_bf16_bf16_8_128x4",
    "merge_state_f32_4_32x1",
];

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
    let (bf16, f32, f16) = (Dtype::Bf16, Dtype::F32, Dtype::F16);
    let ends = |bias, out| Ends { bias, out, pairs: true, grouped: false };
    let mut all = vec![sm90(128), sm90(256)];
    let matrix = |elements, large, ends| Choice::Sm80(sm80::Gemm { elements, large, ends });
    let skinny = |rows| Choice::Skinny(skinny::Skinny { elements: bf16, rows, ends: ends(None, bf16) });
    let dot =
        |rows, x, width| Choice::Dot(dot::Dot { x, weight: bf16, width, rows, ends: ends(Some(bf16), x) });
    let grouped = Ends { bias: None, out: f32, pairs: false, grouped: true };
    let choices = [
        matrix(bf16, true, ends(None, bf16)),
        matrix(bf16, false, ends(Some(bf16), bf16)),
        matrix(f16, true, grouped),
        skinny(8),
        skinny(32),
        dot(1, bf16, 8),
        dot(8, f32, 4),
        Choice::Tiles(tiles::Tiles { x: f32, weight: bf16, width: 4, ends: ends(None, f32) }),
        Choice::Tiles(tiles::Tiles { x: f16, weight: f32, width: 1, ends: grouped }),
    ];
    all.extend(choices.map(|choice| of(choice, Choice::name, |name, choice| choice.kernel(name))));
    all
}

/// What a layer of Llama 3 8B does beside attention and products, with elements of `dtype`.
fn layers(dtype: Dtype) -> Vec<Configured> {
    let width = chunk::most(&[dtype]);
    let norm = |add| Norm { dtype, weight: dtype, width, rows: Rows::for_chunks(4096 / width), add };
    let turned = |style, angles| Rope { dtype, style, angles, width };
    let merged = |two| merge::Merge { dtype, width, rows: rows_of(128 / width), two };
    let to = |cache| Append {
        dtypes: (dtype, cache),
        width: chunk::most(&[dtype, cache]),
        places: append::Kind::Table,
        scaled: dtype != cache,
    };
    let mut all: Vec<Configured> = [false, true].map(|add| of(norm(add), Norm::name, norm::norm)).into();
    all.extend(
        [RopeStyle::Neox, RopeStyle::Interleaved]
            .into_iter()
            .flat_map(|style| [Angles::Table, Angles::Turns].map(|angles| turned(style, angles)))
            .map(|config| of(config, Rope::name, rope::rope)),
    );
    let activations = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];
    let gated = activations.map(|activation| Gated { activation, dtype, width });
    all.extend(gated.map(|config| of(config, Gated::name, act_and_mul)));
    all.extend([to(dtype), to(Dtype::E4m3)].map(|config| of(config, Append::name, append::append)));
    all.extend([true, false].map(|two| of(merged(two), merge::Merge::name, merge::merge)));
    all
}

/// Elements of f32, elements one by one, rows that registers do not hold, and what has no other dtypes.
/// The samplers for large vocabularies, of which one row is a CTA of 1024 threads, and for small ones.
fn samplers() -> Vec<Configured> {
    let (logits, probs) =
        (Sample { kind: Kind::Logits, threads: 1024 }, Sample { kind: Kind::Probs, threads: 128 });
    let named = str::to_owned;
    vec![
        plain(named("sample_logits_bf16_1024"), ALL, move |name| sampling::sample::<bf16>(name, logits)),
        plain(named("sample_probs_f32_128"), ALL, move |name| sampling::sample::<f32>(name, probs)),
        plain(named("distribution_logits_bf16_f32_1024"), ALL, move |name| {
            sampling::distribution::<bf16, f32>(name, logits)
        }),
        plain(named("distribution_probs_f32_f16_128"), ALL, move |name| {
            sampling::distribution::<f32, f16>(name, probs)
        }),
        plain(named("top_k_bf16_1024"), ALL, |name| sampling::top_k::<bf16>(name, 1024)),
        plain(named("top_k_mask_f32_128"), ALL, |name| sampling::top_k_mask::<f32>(name, 128)),
        plain(named("logprobs_bf16_512"), ALL, |name| sampling::logprobs::<bf16>(name, 512)),
        plain(named("chain_logits_f32_bf16_512"), ALL, move |name| {
            sampling::chain::<f32, bf16>(name, Sample { threads: 512, ..logits })
        }),
        plain(named("chain_probs_f32_f32_128"), ALL, move |name| sampling::chain::<f32, f32>(name, probs)),
        plain(named("mask_tokens_bf16"), ALL, sampling::mask_tokens::<bf16>),
        plain(named("penalise_f16"), ALL, sampling::penalise::<f16>),
        plain(named("add_bias_f32"), ALL, sampling::add_bias::<f32>),
    ]
}

fn others() -> Vec<Configured> {
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    let merged = |two| merge::Merge { dtype: f32, width: 4, rows: rows_of(32), two };
    let norm = |width, rows| Norm { dtype: f32, weight: bf16, width, rows, add: true };
    let dynamic = |dtype| append::dynamic::Dynamic { dtypes: (bf16, dtype) };
    let slots =
        |width| Append { dtypes: (bf16, Dtype::I8), width, places: append::Kind::Slots, scaled: true };
    let copied = |to| rows::Copy { dtypes: (bf16, to), width: chunk::most(&[bf16, to]) };
    let mut all: Vec<Configured> =
        [true, false].map(|two| of(merged(two), merge::Merge::name, merge::merge)).into();
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
    let gelu = Gated { activation: Activation::Gelu, dtype: f32, width: 4 };
    all.push(of(gelu, Gated::name, act_and_mul));
    all.push(plain("packbits_little".to_owned(), ALL, |name| bits::packbits(name, BitOrder::Little)));
    all.push(plain("softmax_128256".to_owned(), ALL, |name| softmax(name, Softmax { vocab: 128_256 })));
    all
}

fn rows_of(chunks: u32) -> Rows {
    Rows::for_chunks(chunks).expect("rows that registers hold")
}

/// A kernel that needs nothing newer than Ampere, by its configuration.
fn of<C: Copy + Send + Sync + 'static>(
    config: C,
    name: fn(C) -> String,
    build: fn(&str, C) -> Result<Kernel, Invalid>,
) -> Configured {
    plain(name(config), ALL, move |name| build(name, config))
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
