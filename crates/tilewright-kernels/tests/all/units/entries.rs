//! The list of all kernels.

use std::collections::BTreeSet;
use tilewright_kernels::{KernelEntry, all, common, golden_texts};

#[test]
fn names_are_unique_and_equal_the_ptx_entries() {
    for list in [all(), common()] {
        let names: BTreeSet<&str> = list.iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(names.len(), list.len());
        for kernel in &list {
            assert_eq!((kernel.build)().unwrap().name, kernel.name);
        }
    }
}

/// A name in both lists has one text, so that the gate has measured the code of a bundle.
#[test]
fn both_lists_have_the_same_kernel_under_a_name() {
    let (all, common) = (all(), common());
    let mut shared = 0;
    for ours in &all {
        let Some(theirs) = common.iter().find(|kernel| kernel.name == ours.name) else { continue };
        assert_eq!(ours.archs, theirs.archs, "{}", ours.name);
        let text = |entry: &KernelEntry| {
            let kernel = (entry.build)().unwrap();
            tilewright_ptx::text::without_source_lines(
                &tilewright_ptx::text::ptx(&kernel, ours.archs[0]).unwrap(),
            )
        };
        assert!(text(ours) == text(theirs), "{}", ours.name);
        shared += 1;
    }
    assert!(shared >= 60, "{shared} names are in both lists");
}

#[test]
fn problems_match_kernel_names() {
    let all = all();
    let found: Vec<_> = all.iter().filter(|kernel| kernel.problem.is_some()).collect();
    assert!(found.len() >= 10, "{} kernels", found.len());
    for kernel in found {
        let problem = kernel.problem.unwrap();
        let (dim, qo) = (problem.head_dim(), problem.dtype_o());
        let named =
            [format!("d{}_{}", dim.qk, dim.vo), qo.to_string()].iter().all(|part| kernel.name.contains(part));
        assert!(named, "{}: {problem}", kernel.name);
    }
}

#[test]
fn every_kernel_prints_for_its_architectures() {
    for kernel in all().into_iter().chain(common()) {
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
    assert_eq!(
        names,
        ["gemm_sm80_128_bf16_bf16_pairs", "rmsnorm_bf16_bf16_8_128x4", "merge_state_f32_4_32x1"]
    );
}
