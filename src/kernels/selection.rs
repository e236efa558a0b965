//! Which of the kernels that this version knows are meant.

use super::targets;
use crate::text_error::TextError;
use miette::{IntoDiagnostic, Report, Result, bail};
use tilewright_cuda::cache::Source;
use tilewright_kernels::{Configured, all};

/// The kernels with these names, or that begin as a name with `*` at its end does; all of them without names. Each once, in the
/// order in which they are known.
pub(super) fn kernels(names: &[String]) -> Result<Vec<Configured>> {
    let known = all();
    if let Some(unknown) = names.iter().find(|name| !known.iter().any(|kernel| means(name, &kernel.name))) {
        return Err(no_such(unknown, &known));
    }
    let chosen = |kernel: &Configured| names.is_empty() || names.iter().any(|name| means(name, &kernel.name));
    Ok(known.into_iter().filter(chosen).collect())
}

/// Kernels recorded and printed for the architectures that they are for, or for those of `archs` among them.
pub(super) fn sources(kernels: &[Configured], archs: &[u32]) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for kernel in kernels {
        let wanted = |arch: &&u32| archs.is_empty() || archs.contains(arch);
        let recorded = (kernel.build)().into_diagnostic()?;
        for &arch in kernel.archs.iter().filter(wanted) {
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

/// Whether a kernel is meant by what a person wrote.
fn means(written: &str, kernel: &str) -> bool {
    written.strip_suffix('*').map_or(written == kernel, |beginning| kernel.starts_with(beginning))
}

fn no_such(name: &str, known: &[Configured]) -> Report {
    let same = |kernel: &&Configured| {
        kernel.name.bytes().zip(name.bytes()).take_while(|(theirs, ours)| theirs == ours).count()
    };
    let nearest = known.iter().rev().max_by_key(same).filter(|kernel| same(kernel) > 2);
    let help = nearest.map_or_else(
        || "`tilewright kernels list` names them".to_owned(),
        |kernel| format!("there is {}; `tilewright kernels list` names them all", kernel.name),
    );
    let texts = [format!("no kernel is named `{name}`"), "not known".to_owned(), help];
    TextError::in_argument(("NAME", name), 0..name.len(), texts)
}

#[cfg(test)]
mod tests {
    use super::kernels;

    fn names(written: &[&str]) -> Vec<String> {
        let written: Vec<String> = written.iter().map(|&name| name.to_owned()).collect();
        kernels(&written).unwrap().into_iter().map(|kernel| kernel.name).collect()
    }

    #[test]
    fn names_and_beginnings_mean_kernels() {
        assert_eq!(names(&[]).len(), tilewright_kernels::all().len());
        assert_eq!(names(&["prefill_sm90_d128"]), ["prefill_sm90_d128"]);
        let gemms = names(&["gemm*", "gemm_sm90_128x128"]);
        assert!(gemms.len() > 1 && gemms.iter().all(|name| name.starts_with("gemm")), "{gemms:?}");
        assert!(kernels(&["gemm".to_owned()]).is_err(), "a beginning says that it is one");
    }
}
