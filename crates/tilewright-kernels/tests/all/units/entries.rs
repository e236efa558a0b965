//! The list of all kernels.

use std::collections::BTreeSet;
use tilewright_kernels::{KernelEntry, all, common};
use tilewright_ptx::text::{ptx, without_source_lines};

#[test]
fn kernels_have_unique_names_and_print_for_their_architectures() {
    for list in [all(), common()] {
        let names: BTreeSet<&str> = list.iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(names.len(), list.len());
        for kernel in &list {
            let built = (kernel.build)().unwrap();
            assert_eq!(built.name, kernel.name, "the name of the PTX entry");
            assert!(!kernel.archs.is_empty(), "{kernel:?} is for nothing");
            kernel.archs.iter().for_each(|&arch| drop(ptx(&built, arch).unwrap()));
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
            without_source_lines(&ptx(&kernel, ours.archs[0]).unwrap())
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
