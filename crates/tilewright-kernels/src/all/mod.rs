//! List of all kernels in every configuration that is assembled, measured and compared with golden PTX.
//!
//! A kernel that is not in this list is not tested by the gate. Names are unique and equal the PTX entry names.

mod attention;
mod layers;
mod model_kernels;
mod products;
mod sampling;

use std::fmt;
use tilewright::Problem;
use tilewright_ptx::{
    Invalid, Kernel,
    text::{ptx, without_source_lines},
};

/// Architectures with `wgmma`, which exists in `sm_90a` only.
const HOPPER: &[u32] = &[90];

/// Architectures with clusters of CTAs.
const CLUSTERS: &[u32] = &[90, 100, 120];

/// Architectures of kernels that need Ampere only.
const ALL: &[u32] = &[80, 86, 89, 90, 100, 120];

/// Deterministic recording function.
type Build = Box<dyn Fn() -> Result<Kernel, Invalid> + Send + Sync>;

/// A kernel in one configuration.
pub struct KernelEntry {
    /// Unique name, such as `attention_bf16_bf16_d128_128_wgmma`.
    pub name: String,
    /// Target architectures, as in `sm_90`: a subset of 80, 86, 89, 90, 100, 120.
    pub archs: &'static [u32],
    /// Recording function.
    pub build: Build,
    /// For attention kernels of the engine: a representative problem, for time estimates.
    pub problem: Option<Problem>,
    /// Whether its main loop must overlap the softmax of one tile with the product of another: the row maxima are
    /// between the waits for the two products.
    pub overlap: bool,
}

impl fmt::Debug for KernelEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelEntry")
            .field("name", &self.name)
            .field("archs", &self.archs)
            .field("overlap", &self.overlap)
            .finish_non_exhaustive()
    }
}

/// All kernels, in a fixed order.
pub fn all() -> Vec<KernelEntry> {
    [attention::all(), products::all(), layers::all(), sampling::all()].into_iter().flatten().collect()
}

/// The kernels that engines load for common models, for all architectures: what a bundle has by default.
pub fn common() -> Vec<KernelEntry> {
    model_kernels::all()
}

/// Kernels with golden PTX in `golden/`: few, because a change in shared code changes every file.
const GOLDEN: [&str; 3] =
    ["gemm_sm80_128_bf16_bf16_pairs", "rmsnorm_bf16_bf16_8_128x4", "merge_state_f32_4_32x1"];

/// Names and expected content of the golden files: PTX for the first architecture, without source lines.
///
/// # Errors
/// If a kernel cannot be recorded or printed.
pub fn golden_texts() -> Result<Vec<(String, String)>, Invalid> {
    let text = |entry: &KernelEntry| {
        let arch = entry.archs.first().copied().unwrap_or_default();
        let text = ptx(&(entry.build)()?, arch)?;
        Ok((format!("{}.ptx", entry.name), without_source_lines(&text)))
    };
    all().iter().filter(|entry| GOLDEN.contains(&entry.name.as_str())).map(text).collect()
}

/// Entry of a kernel without overlap, recorded by a function of its name.
fn entry_with(
    name: String,
    archs: &'static [u32],
    build: impl Fn(&str) -> Result<Kernel, Invalid> + Send + Sync + 'static,
) -> KernelEntry {
    let entry = name.clone();
    KernelEntry { name, archs, build: Box::new(move || build(&entry)), problem: None, overlap: false }
}

/// Entry of an Ampere-compatible kernel, named by its configuration.
fn entry<C: Copy + Send + Sync + 'static>(
    config: C,
    name: fn(C) -> String,
    build: fn(&str, C) -> Result<Kernel, Invalid>,
) -> KernelEntry {
    entry_with(name(config), ALL, move |name| build(name, config))
}

/// The list of one architecture.
fn only(arch: u32) -> &'static [u32] {
    ALL.iter().position(|known| *known == arch).map_or(&[], |at| &ALL[at..=at])
}
