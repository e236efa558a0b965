//! Absurd sizes: an error before any memory is allocated, and time linear in the input.

use super::refused;
use std::time::Instant;
use tilewright::{
    Attention, Batch, Cpu, HeadDim, Heads, PageTable, Problem, Workspace,
    attention::{
        Capacity, Split, TreeMask,
        variant::{ExpressionVariant, Variant},
    },
    kv::append::get_batch_indices_positions,
    rope::{CosSinCache, Rope},
};

fn attention() -> Attention<Cpu> {
    let problem = Problem::builder(Heads { qo: 8, kv: 2 }, HeadDim::same(64)).build().expect("it is sound");
    Attention::new(problem, Cpu::with_threads(2).unwrap()).expect("the CPU supports it")
}

#[test]
fn capacities_that_no_step_needs() {
    let attention = attention();
    let table = PageTable::new(&[0, 1], &[0], &[5], 16);
    let refuses = |capacity: Capacity, split: Split, text: &str| {
        let plan = attention.plan_with_capacity(&capacity, &Batch::paged(&[0, 1], table), split);
        refused(plan.map(|plan| plan.array_sizes()), &format!("attention.plan: {text}"));
    };
    let capacity = Capacity::decode(4, 64);
    let pages = |pages| Capacity { pages, ..capacity };
    for most in [usize::MAX, 1 << 40] {
        refuses(pages(most), Split::Balanced, &format!("a capacity of {most} pages, the most is 268435456"));
        // requests without rows have no items
        let requests = Capacity { requests: most, ..capacity };
        refuses(requests, Split::Never, &format!("a capacity of {most} requests, the most is 16777216"));
        let masks = Capacity { mask_bytes: most, ..capacity };
        refuses(masks, Split::Never, &format!("a capacity of {most} bytes of masks, the most is 4294967296"));
    }
    for split in [Split::Fixed { tokens: 1 << 62 }, Split::Fixed { tokens: usize::MAX - 1 }] {
        let capacity = capacity.with_kv_len(usize::MAX);
        let plan = attention.plan_with_capacity(&capacity, &Batch::paged(&[0, 1], table), split);
        assert!(plan.expect("it is one piece").schedule().merges.is_empty(), "{split}");
    }
}

#[test]
fn a_split_longer_than_every_request_is_one_piece() {
    let batch = Batch::ragged(&[0, 1, 70], &[0, 5000, 9000]);
    let plan = |split| attention().plan_with(&batch, split).expect("the batch is sound");
    let expected = plan(Split::Never).schedule().clone();
    for tokens in [1 << 31, 1 << 46, 1 << 62, usize::MAX] {
        assert_eq!(*plan(Split::Fixed { tokens }).schedule(), expected, "{tokens}");
    }
}

#[test]
fn memory_that_no_machine_has() {
    for threads in [0, 1025, usize::MAX] {
        let text = format!("cpu.with_threads: threads = {threads} is not in 1..=1024");
        refused(Cpu::with_threads(threads), &text);
    }
    for bytes in [usize::MAX, 1 << 60] {
        let text = format!("{bytes} bytes need memory that this machine does not give");
        refused(Workspace::with_bytes(bytes), &format!("attention.workspace: {text}"));
    }
    refused(Rope::new(1 << 62, 10_000.0), "rope.new: rotary_dim = 4611686018427387904 is above 65536");
    let rope = Rope::new(1 << 16, 10_000.0).expect("the most");
    assert_eq!(rope.frequencies().len(), 1 << 15);
    let text = "max_positions = 4294967295 of 65536 elements do not fit in memory";
    refused(CosSinCache::new(&rope, u32::MAX), &format!("rope.cos_sin_cache: {text}"));
    let most = i32::MAX as i64;
    let text = "append_indptr ends at 4294967294, the most is 268435456 tokens";
    refused(
        get_batch_indices_positions(&[0, most, 2 * most], &[most as usize; 2]),
        &format!("kv.get_batch_indices_positions: {text}"),
    );
}

#[test]
fn the_masks_of_many_large_trees() {
    let tree: Vec<i32> = (-1..8191).collect();
    let text = "attention.tree_mask: the masks of the trees have 2147483648 bytes, the most is 1073741824";
    refused(TreeMask::new(&[tree.as_slice(); 256]), text);
    assert!(TreeMask::new(&[&tree[..1024]; 400]).is_ok());
}

/// Each of `count` names is bound to the sum of the previous one and an element of a table; all sums are the same node.
fn document(count: usize) -> String {
    let name = |i: usize| if i == 0 { "\"logit\"".to_owned() } else { format!("\"%{}\"", i - 1) };
    let lets: Vec<String> = (0..count)
        .map(|i| {
            format!("[{}, {{\"min\": [{}, {{\"read\": [\"t\", \"s\"]}}]}}]", name(i + 1), name(i.min(1)))
        })
        .collect();
    let table = vec!["1"; count].join(",");
    let scalars: Vec<String> = (0..count).map(|i| format!("\"u{i}\": 1")).collect();
    format!(
        "{{\"name\": \"long\", \"scalars\": {{{}, \"s\": 0}}, \"tables\": {{\"t\": [{table}]}}, \"logits\": \
         {{\"let\": [{}], \"in\": {}}}}}",
        scalars.join(","),
        lets.join(","),
        name(count)
    )
}

#[test]
fn long_json_variants_are_read_in_linear_time() {
    let start = Instant::now();
    let variant = ExpressionVariant::from_json(&document(60_000)).expect("it is sound");
    assert_eq!(variant.name(), "long");
    assert!(start.elapsed().as_secs_f64() < 8.0, "60,000 names took {:?}", start.elapsed());
}
