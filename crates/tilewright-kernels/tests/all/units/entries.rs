//! The list of all kernels.

use std::collections::BTreeSet;
use tilewright_kernels::{all, golden_texts};

#[test]
fn names_are_unique_and_equal_the_ptx_entries() {
    let all = all();
    let names: BTreeSet<&str> = all.iter().map(|kernel| kernel.name.as_str()).collect();
    assert_eq!(names.len(), all.len());
    for kernel in &all {
        assert_eq!((kernel.build)().unwrap().name, kernel.name);
    }
}

#[test]
fn problems_match_kernel_names() {
    let all = all();
    let found: Vec<_> = all.iter().filter(|kernel| kernel.problem.is_some()).collect();
    assert!(found.len() >= 10, "{} kernels", found.len());
    for kernel in found {
        let problem = kernel.problem.unwrap();
        let (dim, qo) = (problem.head_dim(), problem.dtype_o());
        let qk = if problem.is_latent() { dim.vo } else { dim.qk };
        let named = [format!("d{qk}"), qo.to_string()].iter().all(|part| kernel.name.contains(part));
        assert!(named, "{}: {problem}", kernel.name);
    }
}

#[test]
fn every_kernel_prints_for_its_architectures() {
    for kernel in all() {
        assert!(!kernel.archs.is_empty(), "{kernel:?} is for nothing");
        let built = (kernel.build)().unwrap();
        for &arch in kernel.archs {
            tilewright_ptx::text::ptx(&built, arch).unwrap();
        }
    }
}

#[test]
fn golden_names_exist() {
    let texts = golden_texts().unwrap();
    let names: Vec<&str> = texts.iter().map(|(file, _)| file.trim_end_matches(".ptx")).collect();
    assert_eq!(names, ["gemm_sm80", "rmsnorm_bf16", "merge_state_f32"]);
}
