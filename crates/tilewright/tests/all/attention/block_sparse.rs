//! Block-sparse rows against the oracle, over FlashInfer's grid of block sizes, lengths and heads, and beyond it.

use crate::{elements::Elements, generator::Generator, judge::Expected, run::run_batch, sample::Sample};
use tilewright::{
    Backend, Batch, Dtype, HeadDim, Heads, KvCache, KvLayout, Mask, Problem, Workspace,
    attention::{BitOrder, Split, packbits, variant::Plain},
    kv::{BlockSparse, VariableBlockSparse},
    reference::attention::Definition,
};

fn problem(heads: Heads, number: usize, mask: Mask) -> Problem {
    let dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16][number % 3];
    let dim = [HeadDim::same(32), HeadDim { qk: 24, vo: 40 }, HeadDim::same(128)][number / 3 % 3];
    let layout = [KvLayout::Nhd, KvLayout::Hnd][number % 2];
    let builder = Problem::builder(heads, dim).dtypes(dtype, dtype).layout(layout).mask(mask);
    builder.build().expect("it is sound")
}

/// Checks one request in which row `i` attends to key `j` of KV head `g` if `allow(i, j, g)` and the mask allow it.
fn judge<B: Backend + Clone>(
    backends: &[B],
    sample: &Sample,
    batch: &Batch<'_>,
    allow: &dyn Fn(usize, usize, usize) -> bool,
) {
    let (heads, dim) = (sample.problem.heads().kv, sample.problem.head_dim());
    let kv_len = sample.lens[0].1;
    let tensor = |values: &[f32], dim: usize| match sample.problem.layout() {
        KvLayout::Nhd => (Elements::new(sample.problem.dtype_kv(), values), [kv_len, heads, dim]),
        KvLayout::Hnd => {
            let of = |g, j| &values[(j * heads + g) * dim..][..dim];
            let rows = (0..heads).flat_map(|g| (0..kv_len).flat_map(move |j| of(g, j)));
            let values: Vec<f32> = rows.copied().collect();
            (Elements::new(sample.problem.dtype_kv(), &values), [heads, kv_len, dim])
        }
    };
    let (k, v) = (tensor(&sample.k[0], dim.qk), tensor(&sample.v[0], dim.vo));
    let cache = KvCache { k: k.0.view(&k.1), v: v.0.view(&v.1) };
    let visible = |_| Definition { visible: Box::new(|at| allow(at.i, at.j, at.g)), ..Definition::default() };
    let expected = Expected::by(sample, &visible);
    for (backend, split) in
        backends.iter().flat_map(|b| [Split::Balanced, Split::Fixed { tokens: 64 }].map(|s| (b, s)))
    {
        let outcome = run_batch((backend, Plain), (sample, batch, cache), split, &mut Workspace::default());
        expected.assert(backend, &outcome, format_args!("{}, {split:?}", sample.problem));
    }
}

fn blocks_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let mut generator = Generator::new(1);
    let masks = [Mask::Full, Mask::Causal, Mask::Window { left: 30, right: Some(9) }, Mask::Full];
    let grid = [1, 4, 16].into_iter().flat_map(|r| [1, 4, 16].map(|c| (r, c)));
    let grid = grid.flat_map(|block| [(64, 64), (64, 256), (128, 64)].map(|lens| (block, lens)));
    let grid = [((3, 5), (21, 100))].into_iter().chain(grid).chain([((7, 70), (7, 70))]);
    for (number, ((rows, columns), lens)) in crate::judge::subset(grid.enumerate()) {
        let heads =
            [Heads { qo: 1, kv: 1 }, Heads { qo: 4, kv: 1 }, Heads { qo: 4, kv: 4 }, Heads { qo: 16, kv: 4 }]
                [number % 4];
        let sample = Sample::random(problem(heads, number, masks[number % 4]), &[lens], number as u64);
        let (block_rows, block_columns) = (lens.0 / rows, lens.1 / columns);
        let density = [1, 2, 3, 5][number % 4];
        let (mut indptr, mut indices) = (vec![0], Vec::new());
        for _ in 0..block_rows {
            indices.extend((0..block_columns as i32).filter(|_| generator.below(6) < density));
            indptr.push(indices.len() as i32);
        }
        let flags: Vec<bool> = (0..indices.len() * rows * columns).map(|_| generator.below(4) > 0).collect();
        let bytes = packbits(&flags, BitOrder::Little);
        for masked in [false, true] {
            let allow = |i: usize, j: usize, _: usize| {
                let row = indptr[i / rows] as usize..indptr[i / rows + 1] as usize;
                let block = row.clone().find(|&at| indices[at] as usize == j / columns);
                block.is_some_and(|at| !masked || flags[(at * rows + i % rows) * columns + j % columns])
            };
            let blocks = BlockSparse {
                indptr: (&indptr).into(),
                indices: (&indices).into(),
                block: (rows, columns),
                kv_len: lens.1,
                mask: masked.then_some(&bytes),
            };
            judge(backends, &sample, &Batch::block_sparse(blocks), &allow);
        }
    }
}

/// Blocks of few rows with group 1, a shape that resembles decoding.
fn small_blocks_with_one_head_are_causal<B: Backend + Clone>(backends: &[B]) {
    for (number, (rows, columns)) in [(2, 1), (3, 1), (2, 16), (3, 16)].into_iter().enumerate() {
        let (count, kv_len) = (12 / rows, 96);
        let problem = problem(Heads { qo: 2, kv: 2 }, number, Mask::Causal);
        let sample = Sample::random(problem, &[(12, kv_len)], number as u64);
        // every other block, so that rows of a block differ in their visible keys of the last
        let of_row = (0..kv_len / columns).filter(|block| block % 2 == 1).map(|block| block as i32);
        let indices: Vec<i32> = (0..count).flat_map(|_| of_row.clone()).collect();
        let indptr: Vec<i32> = (0..=count).map(|b| (b * indices.len() / count) as i32).collect();
        let (indptr, indices) = ((&indptr).into(), (&indices).into());
        let blocks = BlockSparse { indptr, indices, block: (rows, columns), kv_len, mask: None };
        judge(backends, &sample, &Batch::block_sparse(blocks), &|_, j, _| j / columns % 2 == 1);
    }
}

/// `count` sizes that sum to `total`; some are 0.
fn sizes(generator: &mut Generator, count: usize, total: usize) -> Vec<i32> {
    let mut cuts: Vec<usize> = (1..count).map(|_| generator.below(total + 1)).chain([0, total]).collect();
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| (cut[1] - cut[0]) as i32).collect()
}

fn blocks_of_any_size_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let mut generator = Generator::new(2);
    let heads =
        [Heads { qo: 1, kv: 1 }, Heads { qo: 4, kv: 4 }, Heads { qo: 8, kv: 4 }, Heads { qo: 16, kv: 16 }];
    for number in crate::judge::subset(0..12) {
        let (heads, lens) = (heads[number % 4], [(256, 256), (100, 300), (30, 7)][number % 3]);
        let mask = [Mask::Full, Mask::Causal, Mask::Window { left: 50, right: None }][number % 3];
        let sample = Sample::random(problem(heads, number, mask), &[lens], number as u64);
        let (rows, columns) = ([10, 20][number % 2], [50, 13][number / 2 % 2]);
        let density = [2, 7, 9][number / 4];
        let row_sizes: Vec<i32> = (0..heads.kv).flat_map(|_| sizes(&mut generator, rows, lens.0)).collect();
        let column_sizes: Vec<i32> =
            (0..heads.kv).flat_map(|_| sizes(&mut generator, columns, lens.1)).collect();
        let blocks: Vec<bool> =
            (0..heads.kv * rows * columns).map(|_| generator.below(10) < density).collect();
        let block_of = |sizes: &[i32], at: usize| {
            let mut end = 0;
            sizes.iter().position(|size| {
                end += *size as usize;
                at < end
            })
        };
        let allow = |i: usize, j: usize, g: usize| {
            let row = block_of(&row_sizes[g * rows..(g + 1) * rows], i).expect("sizes add up");
            let column = block_of(&column_sizes[g * columns..(g + 1) * columns], j).expect("sizes add up");
            blocks[(g * rows + row) * columns + column]
        };
        let batch = Batch::variable_block_sparse(VariableBlockSparse {
            blocks: &blocks,
            row_sizes: (&row_sizes).into(),
            column_sizes: (&column_sizes).into(),
        });
        judge(backends, &sample, &batch, &allow);
    }
}

crate::judge_backends!(
    blocks_agree_with_the_oracle,
    small_blocks_with_one_head_are_causal,
    blocks_of_any_size_agree_with_the_oracle
);
crate::judge_bodies!(small_blocks_with_one_head_are_causal);
