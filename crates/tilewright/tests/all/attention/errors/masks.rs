//! Errors of packed masks, trees of draft tokens and `segment_packbits`.

use super::{plan::plan_refuses, refused};
use tilewright::{
    Batch, Cpu, HeadDim, Heads, Mask, Problem,
    attention::{Attention, BitOrder, PackedMask, TreeMask, packbits, segment_packbits},
};

/// One row over 10 keys, and three over 5: bits of 2 bytes each.
fn ragged() -> Batch<'static> {
    Batch::ragged(&[0, 1, 4], &[0, 10, 15])
}

#[test]
fn masks_with_too_few_or_too_many_bytes() {
    let says = |has: usize, expected: u64| {
        format!("mask has {has} bytes, expected {expected}: ceil(qo_len * columns / 8) for each request")
    };
    for has in [0, 3, 5] {
        plan_refuses(&ragged().with_mask(PackedMask::new(&[0; 5][..has])), &says(has, 4));
    }
    // 1 * 9 bits and 3 * 3 bits
    plan_refuses(&ragged().with_mask(PackedMask::last(&[0; 3], &[9, 3])), &says(3, 4));
    plan_refuses(&ragged().with_mask(PackedMask::last(&[0; 3], &[8, 2])), &says(3, 2));
    plan_refuses(&ragged().with_mask(PackedMask::last(&[0; 1], &[0, 0])), &says(1, 0));
}

#[test]
fn masks_whose_columns_are_not_those_of_requests() {
    let columns = |columns: &[i64], text: &str| {
        plan_refuses(&ragged().with_mask(PackedMask::last(&[0; 4], columns)), text);
    };
    columns(&[10], "mask columns has 1 entries, expected num_requests = 2");
    columns(&[10, 5, 0], "mask columns has 3 entries, expected num_requests = 2");
    columns(&[11, 5], "request 0: mask columns = 11 is not in 0..=10");
    columns(&[10, 6], "request 1: mask columns = 6 is not in 0..=5");
    columns(&[10, -1], "request 1: mask columns = -1 is not in 0..=5");
    columns(&[i64::MAX, 5], "request 0: mask columns = 9223372036854775807 is not in 0..=10");
}

#[test]
fn masks_of_overflowing_batches() {
    const MAX: i64 = i64::MAX;
    let refuses = |qo: &[i64], kv: &[i64], text: &str| {
        plan_refuses(&Batch::ragged(qo, kv).with_mask(PackedMask::new(&[])), text);
    };
    let most = "tokens, the most is 2147483647";
    refuses(&[0, MAX], &[0, MAX], &format!("{MAX} query rows and a longest request of {MAX} {most}"));
    refuses(&[0, 2, MAX], &[0, 1, 2], &format!("{MAX} query rows and a longest request of 1 {most}"));
    let all = i64::from(i32::MAX);
    let text = "mask has 0 bytes, expected 576460751766552577: ceil(qo_len * columns / 8) for each request";
    refuses(&[0, all], &[0, all], text);
}

#[test]
fn a_plan_without_a_mask_after_one_with_it() {
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).build().expect("it is sound");
    let attention = Attention::new(problem, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
    let before = attention.plan(&ragged()).expect("it is sound");
    let masked = attention.plan(&ragged().with_mask(PackedMask::new(&[0x5a; 4]))).expect("it is sound");
    let kept = masked.clone();
    let other = attention.plan(&ragged().with_mask(PackedMask::new(&[0xff; 4]))).expect("it is sound");
    let after = attention.plan(&ragged()).expect("it is sound");
    assert!(before == after && before != masked && masked != other, "the operator remembers no mask");
    assert_eq!(kept, masked, "a plan never changes");
}

#[test]
fn trees_whose_parents_are_not_earlier_tokens() {
    let refuses = |parents: &[&[i32]], text: &str| {
        refused(TreeMask::new(parents), &format!("attention.tree_mask: {text}"));
    };
    let expected = "expected -1 or an earlier token";
    refuses(&[&[0]], &format!("request 0: token 0 has parent 0, {expected}"));
    refuses(&[&[-1], &[-1, 2, 0]], &format!("request 1: token 1 has parent 2, {expected}"));
    refuses(&[&[-1, 1]], &format!("request 0: token 1 has parent 1, {expected}"));
    refuses(&[&[-1, -2]], &format!("request 0: token 1 has parent -2, {expected}"));
    refuses(&[&[i32::MIN]], &format!("request 0: token 0 has parent -2147483648, {expected}"));
    refuses(&[&[i32::MAX]], &format!("request 0: token 0 has parent 2147483647, {expected}"));
    refuses(&[&[], &[-1; 8193]], "request 1: the tree has 8193 tokens, the most is 8192");
    assert!(TreeMask::new(&[]).is_ok() && TreeMask::new(&[&[-1; 8192]]).is_ok());
}

#[test]
fn trees_that_are_not_those_of_the_batch() {
    let tree = TreeMask::new(&[&[-1, 0], &[-1]]).expect("parents come first");
    let text = "mask has 2 bytes, expected 3: ceil(qo_len * columns / 8) for each request";
    plan_refuses(&Batch::ragged(&[0, 5, 6], &[0, 10, 15]).with_mask(tree.as_mask()), text);
    let text = "mask columns has 2 entries, expected num_requests = 1";
    plan_refuses(&Batch::ragged(&[0, 2], &[0, 10]).with_mask(tree.as_mask()), text);
    let text = "request 0: mask columns = 2 is not in 0..=1";
    plan_refuses(&Batch::ragged(&[0, 2, 3], &[0, 1, 15]).with_mask(tree.as_mask()), text);
}

#[test]
fn segments_of_flags_that_are_malformed() {
    let refuses = |indptr: &[i64], text: &str| {
        let packed = segment_packbits(&[true; 10], indptr, BitOrder::Little);
        refused(packed, &format!("attention.segment_packbits: {text}"));
    };
    refuses(&[], "indptr has no entries, expected num_segments + 1");
    refuses(&[1, 10], "indptr starts at 1, expected 0");
    refuses(&[0, 4, 3, 10], "segment 1: indptr decreases from 4 to 3");
    refuses(&[0, 9], "indptr ends at 9, expected the 10 flags");
    refuses(&[0, i64::MAX], "indptr ends at 9223372036854775807, expected the 10 flags");
    refuses(&[0, i64::MIN], "segment 0: indptr decreases from 0 to -9223372036854775808");
    let packed = segment_packbits(&[true; 10], &[0, 9, 9, 10], BitOrder::Little);
    assert_eq!(packed, Ok((vec![255, 1, 1], vec![0, 2, 2, 3])));
    assert!(packbits(&[], BitOrder::Big).is_empty());
}

#[test]
fn windows_of_any_size_are_planned() {
    for (left, right) in [(0, Some(0)), (u32::MAX, Some(u32::MAX)), (0, None), (u32::MAX, Some(0))] {
        let mask = Mask::Window { left, right };
        let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).mask(mask).build();
        let attention =
            Attention::new(problem.expect("it is sound"), Cpu::with_threads(1).unwrap()).expect("it can");
        let long = [0, i64::from(i32::MAX)];
        for (qo, kv) in [(&[0, 5], &[0, 3]), (&[0, 5], &long), (&[0, 100_000], &[0, 0])] {
            let plan = attention.plan(&Batch::ragged(qo, kv)).expect("it is sound");
            assert!(plan.explain().to_string().contains("work item"), "{mask}");
        }
    }
}
