//! Errors of block-sparse batches at `plan`, and of mismatched tensors at `run`.

use super::plan::plan_refuses;
use crate::elements::Elements;
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, Output, PageTable, Problem, Workspace,
    attention::{Level, PackedMask, Shard},
    kv::{BlockSparse, VariableBlockSparse},
};

/// Two block rows of 2 rows: keys 0..3 and 6..9 for the first, 3..6 for the second.
fn blocks() -> BlockSparse<'static> {
    BlockSparse {
        indptr: (&[0, 2, 3]).into(),
        indices: (&[0, 2, 1]).into(),
        block: (2, 3),
        kv_len: 9,
        mask: None,
    }
}

#[track_caller]
fn blocks_refused(change: impl FnOnce(&mut BlockSparse<'static>), text: &str) {
    let mut blocks = blocks();
    change(&mut blocks);
    plan_refuses(&Batch::block_sparse(blocks), text);
}

#[test]
fn blocks_of_no_size_or_too_large() {
    blocks_refused(|b| b.block = (0, 3), "block = (0, 3), expected at least (1, 1)");
    blocks_refused(|b| b.block = (2, 0), "block = (2, 0), expected at least (1, 1)");
    blocks_refused(|b| b.kv_len = 10, "kv_len = 10 is not a multiple of the 3 keys of a block");
    blocks_refused(
        |b| b.block.1 = usize::MAX,
        "kv_len = 9 is not a multiple of the 18446744073709551615 keys of a block",
    );
    let most = usize::MAX;
    let rows = |rows: usize| format!("2 block rows of {rows} rows and kv_len = 9, the most is 2147483647");
    blocks_refused(|b| b.block.0 = most, &rows(most));
    blocks_refused(|b| b.block.0 = 1 << 30, &rows(1 << 30));
    let keys = format!("2 block rows of 2 rows and kv_len = {most}, the most is 2147483647");
    blocks_refused(|b| b.kv_len = most, &keys);
}

#[test]
fn block_rows_that_are_malformed() {
    blocks_refused(|b| b.indptr = (&[0_i32; 0]).into(), "indptr has no entries, expected num_block_rows + 1");
    blocks_refused(|b| b.indptr = (&[1, 3]).into(), "indptr starts at 1, expected 0");
    blocks_refused(|b| b.indptr = (&[0, 3, 2]).into(), "block row 1: indptr decreases from 3 to 2");
    blocks_refused(|b| b.indptr = (&[0, 2, 4]).into(), "indptr ends at 4, but indices has 3 blocks");
    blocks_refused(|b| b.indptr = (&[0, 2]).into(), "indptr ends at 2, but indices has 3 blocks");
    let most = "indptr ends at 9223372036854775807, but indices has 3 blocks";
    blocks_refused(|b| b.indptr = (&[0, i64::MAX]).into(), most);
}

#[test]
fn columns_that_do_not_exist_or_do_not_ascend() {
    let refuses =
        |indices: &'static [i64; 3], text: &str| blocks_refused(|b| b.indices = indices.into(), text);
    // the error names the first column out of range, not the next one
    refuses(&[0, 3, 1], "block row 0: block = 3 is not in 0..3");
    refuses(&[0, 2, -1], "block row 1: block = -1 is not in 0..3");
    refuses(&[0, 2, i64::MAX], "block row 1: block = 9223372036854775807 is not in 0..3");
    refuses(&[i64::MIN, 2, 1], "block row 0: block = -9223372036854775808 is not in 0..3");
    refuses(&[2, 0, 1], "block row 0: block 0 comes after 2, expected ascending columns");
    refuses(&[1, 1, 1], "block row 0: block 1 comes after 1, expected ascending columns");
}

#[test]
fn block_masks_of_another_size() {
    let text = |has: usize| format!("mask has {has} bytes, expected 3: ceil(blocks * R * C / 8)");
    blocks_refused(|b| b.mask = Some(&[]), &text(0));
    blocks_refused(|b| b.mask = Some(&[0; 2]), &text(2));
    blocks_refused(|b| b.mask = Some(&[0; 4]), &text(4));
}

/// Two KV heads, 4 rows and 6 keys, with different blocks per head.
fn variable() -> VariableBlockSparse<'static> {
    VariableBlockSparse {
        blocks: &[true; 8],
        row_sizes: (&[1, 3, 4, 0]).into(),
        column_sizes: (&[6, 0, 2, 4]).into(),
    }
}

#[track_caller]
fn variable_refused(change: impl FnOnce(&mut VariableBlockSparse<'static>), text: &str) {
    let mut blocks = variable();
    change(&mut blocks);
    plan_refuses(&Batch::variable_block_sparse(blocks), text);
}

#[test]
fn variable_blocks_that_are_malformed() {
    let multiple = "expected a multiple of num_kv_heads = 2";
    variable_refused(|b| b.row_sizes = (&[4, 4, 4]).into(), &format!("row_sizes has 3 entries, {multiple}"));
    variable_refused(|b| b.column_sizes = (&[6]).into(), &format!("column_sizes has 1 entries, {multiple}"));
    let flags = "expected num_kv_heads * block rows * block columns = 8";
    variable_refused(|b| b.blocks = &[true; 7], &format!("blocks has 7 flags, {flags}"));
    variable_refused(|b| b.blocks = &[], &format!("blocks has 0 flags, {flags}"));
    let negative = "KV head 1: row_sizes[0] = -1 is negative";
    variable_refused(|b| b.row_sizes = (&[1, 3, -1, 5]).into(), negative);
    let other = "KV head 1: column_sizes add up to 7, expected 6 as for KV head 0";
    variable_refused(|b| b.column_sizes = (&[6, 0, 2, 5]).into(), other);
}

#[test]
fn variable_blocks_that_are_too_large() {
    const MAX: i64 = i64::MAX;
    let most = "the most is 2147483647";
    let text = format!("KV head 0: row_sizes add up to 2147483648, {most}");
    variable_refused(|b| b.row_sizes = (&[1, i32::MAX, 4, 0]).into(), &text);
    let text = format!("KV head 0: column_sizes add up to 9223372036854775807, {most}");
    variable_refused(|b| b.column_sizes = (&[MAX, MAX, 2, 4]).into(), &text);
    // small arrays that would produce a plan of 16 GiB
    let text = "block rows look at 4294967294 keys in all, the most is 268435456";
    let all = [i32::MAX, 0, i32::MAX, 0];
    variable_refused(
        |b| {
            b.column_sizes = (&[i32::MAX, 0, i32::MAX, 0]).into();
            b.blocks = &[true, true, false, false, false, false, true, true];
        },
        text,
    );
    let few = VariableBlockSparse { blocks: &[false; 8], column_sizes: (&all).into(), ..variable() };
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).build().expect("it is sound");
    let attention = Attention::new(problem, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
    assert!(
        attention.plan(&Batch::variable_block_sparse(few)).is_ok(),
        "keys that none looks at cost nothing"
    );
}

#[test]
fn blocks_take_no_other_part_of_a_batch() {
    let table = PageTable::new(&[0, 1], &[7], &[4], 4);
    let levels = [Level { qo_indptr: (&[0, 4]).into(), table }];
    let shard = Shard { kv_offsets: (&[0]).into(), kv_lens: (&[9]).into() };
    for batch in [Batch::block_sparse(blocks()), Batch::variable_block_sparse(variable())] {
        let says = |what: &str| format!("a block-sparse batch takes no {what}");
        plan_refuses(&batch.with_mask(PackedMask::new(&[0; 5])), &says("packed mask"));
        plan_refuses(&batch.with_levels(&levels), &says("levels"));
        plan_refuses(&batch.with_shared_prefixes(), &says("levels"));
        plan_refuses(&batch.with_shard(shard), &says("shard"));
    }
}

#[test]
fn tensors_of_another_length_than_the_blocks() {
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).build().expect("it is sound");
    let attention = Attention::new(problem, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
    let plan = attention.plan(&Batch::block_sparse(blocks())).expect("the blocks are sound");
    let zeros = |len: usize| Elements::filled(Dtype::F32, len, 0.0);
    let run = |rows: usize, k_len: usize, v_len: usize| {
        let (q, k, v) = (zeros(rows * 32), zeros(k_len * 16), zeros(v_len * 16));
        let (mut o, mut workspace) = (zeros(4 * 32), Workspace::for_plan(&plan));
        let kv = KvCache { k: k.view(&[k_len, 2, 8]), v: v.view(&[v_len, 2, 8]) };
        let out = Output { o: o.view_mut(&[4, 4, 8]), lse: None, workspace: &mut workspace };
        attention.run(&plan, q.view(&[rows, 4, 8]), kv, out)
    };
    assert_eq!(run(4, 9, 9), Ok(()));
    let refused = |result, text: &str| super::refused(result, &format!("attention.run: {text}"));
    refused(run(4, 8, 9), "k has 8 tokens, the blocks are of 9");
    refused(run(4, 9, 10), "v has 10 tokens, the blocks are of 9");
    let text = "q has shape [3, 4, 8], expected [num_rows, num_qo_heads, head_dim] = [4, 4, 8]";
    refused(run(3, 9, 9), text);
}
