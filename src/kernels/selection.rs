//! Selection of kernels by name or prefix.

use super::targets;
use crate::text_error::TextError;
use miette::{IntoDiagnostic, Report, Result, bail};
use std::collections::BTreeSet;
use tilewright_cuda::cache::Source;
use tilewright_kernels::{KernelEntry, all, common};

/// All kernels: those of tests, then those that only engines load, each once.
pub(super) fn known() -> Vec<KernelEntry> {
    let mut known = all();
    let names: BTreeSet<String> = known.iter().map(|kernel| kernel.name.clone()).collect();
    known.extend(common().into_iter().filter(|kernel| !names.contains(&kernel.name)));
    known
}

/// The kernels with these names, or with the prefix of a name that ends in `*`; for no names, those that engines load for common
/// models. Each once.
pub(super) fn select(names: &[String]) -> Result<Vec<KernelEntry>> {
    if names.is_empty() {
        return Ok(common());
    }
    let known = known();
    if let Some(unknown) = names.iter().find(|name| !known.iter().any(|kernel| matches(name, &kernel.name))) {
        return Err(unknown_kernel(unknown, &known));
    }
    let chosen = |kernel: &KernelEntry| names.iter().any(|name| matches(name, &kernel.name));
    Ok(known.into_iter().filter(chosen).collect())
}

/// The PTX of `kernels` for all their architectures, or for those in `archs`.
pub(super) fn sources(kernels: &[KernelEntry], archs: &[u32]) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for kernel in kernels {
        let selected = |arch: &&u32| archs.is_empty() || archs.contains(arch);
        let recorded = (kernel.build)().into_diagnostic()?;
        for &arch in kernel.archs.iter().filter(selected) {
            sources.push(Source::of(&recorded, arch).into_diagnostic()?);
        }
    }
    if sources.is_empty() {
        let names: Vec<String> = kernels
            .iter()
            .map(|kernel| format!("{} is for {}", kernel.name, targets(kernel.archs)))
            .collect();
        bail!("kernels: none of them is for {}: {}", targets(archs), names.join("; "));
    }
    Ok(sources)
}

/// Whether `pattern` matches the name `kernel`.
fn matches(pattern: &str, kernel: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == kernel, |prefix| kernel.starts_with(prefix))
}

fn unknown_kernel(name: &str, known: &[KernelEntry]) -> Report {
    let common_prefix = |kernel: &&KernelEntry| {
        kernel.name.bytes().zip(name.bytes()).take_while(|(known, given)| known == given).count()
    };
    let nearest = known.iter().rev().max_by_key(common_prefix).filter(|kernel| common_prefix(kernel) > 2);
    let help = nearest.map_or_else(
        || "`tilewright kernels list` names them".to_owned(),
        |kernel| format!("there is {}; `tilewright kernels list` names them all", kernel.name),
    );
    let texts = [format!("no kernel is named `{name}`"), "not known".to_owned(), help];
    TextError::in_argument("NAME", name, 0..name.len(), texts)
}

#[cfg(test)]
mod tests {
    use super::select;

    fn names(patterns: &[&str]) -> Vec<String> {
        let patterns: Vec<String> = patterns.iter().map(|&name| name.to_owned()).collect();
        select(&patterns).unwrap().into_iter().map(|kernel| kernel.name).collect()
    }

    #[test]
    fn names_and_prefixes_select_kernels() {
        assert_eq!(names(&[]).len(), tilewright_kernels::common().len());
        assert!(names(&["*"]).len() > tilewright_kernels::all().len());
        assert_eq!(names(&["attention_bf16_bf16_d128_128_wgmma"]), ["attention_bf16_bf16_d128_128_wgmma"]);
        let gemms = names(&["gemm*", "gemm_sm80_128_bf16_bf16_pairs"]);
        assert!(gemms.len() > 1 && gemms.iter().all(|name| name.starts_with("gemm")), "{gemms:?}");
        assert!(select(&["gemm".to_owned()]).is_err(), "a prefix needs `*`");
    }
}
