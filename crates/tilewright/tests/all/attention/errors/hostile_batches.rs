//! Random batches with masks, levels, shards, blocks and latent problems and extreme numbers: each is rejected, or
//! planned and explained; none panics.

use super::hostile::{CALLS, NUMBERS, indptr};
use crate::generator::Generator;
use tilewright::{
    Attention, Batch, Cpu, HeadDim, Heads, Mask, PageTable, Problem,
    attention::{Level, PackedMask, Shard, Split, TreeMask},
    kv::{BlockSparse, VariableBlockSparse},
};

/// Random numbers, mostly small.
fn numbers(generator: &mut Generator, count: usize) -> Vec<i64> {
    let next =
        |_| if generator.below(12) == 0 { generator.pick(&NUMBERS) } else { generator.below(6) as i64 };
    (0..count).map(next).collect()
}

/// Operators with each mask, and a latent one.
fn operators() -> Vec<Attention<Cpu>> {
    let plain = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8));
    let widest = Mask::Window { left: u32::MAX, right: Some(u32::MAX) };
    let masks = [Mask::Full, Mask::Causal, widest, Mask::Window { left: 1, right: None }];
    let problems =
        masks.map(|mask| plain.clone().mask(mask)).into_iter().chain([Problem::latent(4, 8, 4).scale(0.1)]);
    let operator = |problem: tilewright::attention::ProblemBuilder| {
        Attention::new(problem.build().expect("it is sound"), Cpu::with_threads(1).unwrap())
            .expect("the CPU can do it")
    };
    problems.map(operator).collect()
}

/// Whether the batch was planned.
fn plans(attention: &Attention<Cpu>, batch: &Batch<'_>, generator: &mut Generator) -> bool {
    let split = generator.pick(&[Split::Balanced, Split::Never, Split::Fixed { tokens: 1 << 20 }]);
    attention.plan_with(batch, split).is_ok_and(|plan| !plan.explain().to_string().is_empty())
}

#[test]
fn masks_levels_and_shards_of_extreme_numbers() {
    let (mut generator, operators) = (Generator::new(11), operators());
    let (mut accepted, bytes) = ([0; 4], vec![0x5a; 64]);
    for _ in 0..CALLS {
        let count = generator.below(4);
        let (qo, kv) = (indptr(&mut generator, count + 1), indptr(&mut generator, count + 1));
        // billions of query rows are valid, but their plan is too large for a test
        if qo.iter().any(|row| (1 << 20..1 << 31).contains(row)) {
            continue;
        }
        let pages = kv.last().map_or(0, |end| (*end).clamp(0, 9)) as usize;
        let indices = vec![generator.below(3) as i64; pages];
        let last: Vec<i64> = kv.windows(2).map(|kv| i64::from(kv[0] < kv[1])).collect();
        let page_size = generator.pick(&[1, 1, 5, 1 << 31, usize::MAX]);
        let table = PageTable::new(&kv, &indices, &last, page_size);
        let batch = if generator.below(2) == 0 { Batch::paged(&qo, table) } else { Batch::ragged(&qo, &kv) };
        let (offsets, lens) = (numbers(&mut generator, count), numbers(&mut generator, count));
        let bits = &bytes[..generator.below(12)];
        let groups = generator.below(3);
        let (rows, level_kv) = (indptr(&mut generator, groups + 1), indptr(&mut generator, groups + 1));
        let level_pages = vec![1; level_kv[groups].clamp(0, 9) as usize];
        let full: Vec<i64> =
            level_kv.windows(2).map(|kv| if kv[0] < kv[1] { page_size as i64 } else { 0 }).collect();
        let level = Level {
            qo_indptr: (&rows).into(),
            table: PageTable::new(&level_kv, &level_pages, &full, page_size),
        };
        let levels = vec![level; generator.below(3)];
        let batches = [
            batch.with_mask(PackedMask::last(bits, &offsets)),
            batch.with_levels(&levels),
            batch.with_shared_prefixes(),
            batch.with_shard(Shard { kv_offsets: (&offsets).into(), kv_lens: (&lens).into() }),
        ];
        let attention = &operators[generator.below(operators.len())];
        for (accepted, batch) in accepted.iter_mut().zip(batches) {
            *accepted += usize::from(plans(attention, &batch, &mut generator));
        }
        let all = batch.with_mask(PackedMask::new(bits)).with_levels(&levels);
        plans(attention, &all, &mut generator);
    }
    assert!(accepted.iter().all(|&accepted| accepted > CALLS / 200), "{accepted:?} of {CALLS} were sound");
}

#[test]
fn blocks_of_extreme_numbers() {
    let (mut generator, operators) = (Generator::new(12), operators());
    let mut accepted = [0; 2];
    for _ in 0..CALLS {
        let count = generator.below(4);
        let indptr = indptr(&mut generator, count + 1);
        let blocks = indptr[count].clamp(0, 9) as usize;
        let indices: Vec<i64> =
            (0..blocks as i64).map(|at| if generator.below(20) == 0 { -at } else { at }).collect();
        let sizes = [1, 1, 2, 3, 0, usize::MAX, 1 << 62];
        let bytes = vec![0x5a; generator.below(9)];
        let blocks = BlockSparse {
            indptr: (&indptr).into(),
            indices: (&indices).into(),
            block: (generator.pick(&sizes), generator.pick(&sizes)),
            kv_len: generator.pick(&[0, 12, 12, 24, 1 << 62, usize::MAX, i32::MAX as usize]),
            mask: (generator.below(2) == 0).then_some(&bytes),
        };
        let (rows, columns) = (1 + generator.below(2), 1 + generator.below(2));
        let twice = |mut sizes: Vec<i64>| {
            sizes.extend_from_within(..);
            sizes
        };
        let rows = twice(numbers(&mut generator, rows));
        let columns = twice(numbers(&mut generator, columns));
        let flags: Vec<bool> =
            (0..2 * rows.len() / 2 * columns.len() / 2).map(|_| generator.below(2) == 0).collect();
        // a table of all tokens is valid, but too large for a test
        let large = |sizes: &[i64]| sizes.iter().any(|size| (1 << 20..1 << 31).contains(size));
        let variable = VariableBlockSparse {
            blocks: &flags,
            row_sizes: (&rows).into(),
            column_sizes: (&columns).into(),
        };
        let attention = &operators[generator.below(operators.len() - 1)];
        accepted[0] += usize::from(plans(attention, &Batch::block_sparse(blocks), &mut generator));
        if !large(&rows) {
            let batch = Batch::variable_block_sparse(variable);
            accepted[1] += usize::from(plans(attention, &batch, &mut generator));
        }
    }
    assert!(accepted.iter().all(|&accepted| accepted > CALLS / 200), "{accepted:?} of {CALLS} were sound");
}

#[test]
fn trees_of_extreme_numbers() {
    let mut generator = Generator::new(13);
    let mut accepted = 0;
    for _ in 0..CALLS {
        let count = generator.below(6);
        let mut parent = |token: usize| match generator.below(12) {
            0 => generator.pick(&NUMBERS) as i32,
            _ => generator.below(token + 1) as i32 - 1,
        };
        let parents: Vec<i32> = (0..count).map(&mut parent).collect();
        accepted += usize::from(TreeMask::new(&[&parents, &[-1]]).is_ok());
    }
    assert!(accepted > CALLS / 4, "only {accepted} trees were sound");
}
