//! Latent attention (MLA), single requests, and context-parallel shards.

use crate::{Elements, Expected, Lens, Outcome, Sample, Storage, Stored, execute, run};
use tilewright::{
    Attention, Backend, Dtype, HeadDim, Heads, Mask, Output, Problem, Scale, View, Workspace,
    attention::{LatentCache, LatentQuery, QuantizedLatentCache, Shard, Split, merge_states},
};

fn absorbed_decode_agrees_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    // FlashInfer's lengths: 0, 1, 3, 11 / 17 to 114 / 514, with 1 to 17 odd query rows
    let batches: [&[Lens]; 3] =
        [&[(1, 0), (1, 1), (3, 3), (1, 11)], &[(1, 17), (5, 97), (17, 114), (1, 33)], &[(1, 514), (3, 96)]];
    let grid = batches.into_iter().flat_map(|lens| [1, 16, 64].map(|page_size| (lens, page_size)));
    for (number, (lens, page_size)) in crate::judge::subset(grid.enumerate()) {
        check_latent(backends, (number, None), (lens, page_size));
    }
}

/// Caches of 8 bits with one scale for both tensors, on a kernel without tensor cores.
fn an_8_bit_latent_cache_agrees_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let lens: &[Lens] = &[(1, 0), (1, 11), (3, 96), (2, 300)];
    let dtypes = [Dtype::E4m3, Dtype::E5m2, Dtype::I8];
    for (number, (dtype, scale)) in dtypes.into_iter().zip([0.02, 3.0, 0.25]).enumerate() {
        // both kinds of scale
        for number in [number, number + 3] {
            check_latent(backends, (number, Some((dtype, scale))), (lens, 16));
        }
    }
}

fn check_latent<B: Backend + Clone>(
    backends: &[B],
    (number, quantized): (usize, Option<(Dtype, f32)>),
    (lens, page_size): (&[Lens], usize),
) {
    let (heads, dtype) = [(16, Dtype::Bf16), (4, Dtype::F16), (64, Dtype::F32), (3, Dtype::Bf16)][number % 4];
    let (ckv, kpe) = [(512, 64), (512, 64), (96, 40), (33, 7)][number % 4];
    let mask = [Mask::Causal, Mask::Full][number % 2];
    let scale = 1.0 / 192_f32.sqrt();
    let kv_dtype = quantized.map_or(dtype, |(dtype, _)| dtype);
    let problem = Problem::latent(heads, ckv, kpe).dtypes(dtype, kv_dtype).mask(mask).scale(scale).build();
    let plain = Problem::builder(Heads { qo: heads, kv: 1 }, HeadDim { qk: ckv + kpe, vo: ckv });
    let plain = plain.dtypes(dtype, kv_dtype).mask(mask).scale(scale).build().expect("it is sound");
    let mut sample = Sample::random(plain, lens, number as u64);
    for (k, v) in sample.k.iter().zip(&mut sample.v) {
        *v = k.chunks_exact(ckv + kpe).flat_map(|key| &key[..ckv]).copied().collect();
    }
    let stored = Stored::new(&sample, Storage::Paged(page_size), number as u64);
    let pages = stored.cache().k.shape()[0];
    let split = |values: &[f32], skip: usize, width: usize| -> Vec<f32> {
        values.chunks_exact(ckv + kpe).flat_map(|row| &row[skip..skip + width]).copied().collect()
    };
    let all = stored.keys();
    let (c, p) =
        (Elements::new(kv_dtype, &split(&all, 0, ckv)), Elements::new(kv_dtype, &split(&all, ckv, kpe)));
    let cache = LatentCache { ckv: c.view(&[pages, page_size, ckv]), kpe: p.view(&[pages, page_size, kpe]) };
    let (nope, pe) =
        (Elements::new(dtype, &split(&sample.q, 0, ckv)), Elements::new(dtype, &split(&sample.q, ckv, kpe)));
    let rows = sample.num_rows();
    let q = LatentQuery { nope: nope.view(&[rows, heads, ckv]), pe: pe.view(&[rows, heads, kpe]) };
    let scale = quantized.map_or(1.0, |(_, scale)| scale);
    let value = View::new(std::slice::from_ref(&scale), &[1]).expect("a view");
    let kind =
        |number: usize| if number.is_multiple_of(2) { Scale::Tensor(scale) } else { Scale::Values(value) };
    let scale_of_cache = quantized.map_or(Scale::One, |_| kind(number));
    if quantized.is_some() {
        sample.k.iter_mut().chain(&mut sample.v).flatten().for_each(|x| *x *= scale);
    }
    let expected = Expected::of(&sample);
    for backend in backends {
        let attention =
            Attention::new(problem.clone().expect("it is sound"), backend.clone()).expect("it can");
        let plan = attention.plan(&stored.batch()).expect("the batch is sound");
        let mut o = Elements::filled(dtype, rows * heads * ckv, f32::NAN);
        let mut lse = Elements::filled(Dtype::F32, rows * heads, f32::NAN);
        let workspace = &mut Workspace::for_plan(&plan);
        let lse_view = Some(lse.view_mut(&[rows, heads]));
        let out = Output { o: o.view_mut(&[rows, heads, ckv]), lse: lse_view, workspace };
        attention
            .run_latent_scaled(&plan, q, QuantizedLatentCache { cache, scale: scale_of_cache }, out)
            .expect("the tensors fit");
        let outcome = Outcome { o: o.to_f32(), lse: Some(lse.to_f32()), weights: attention.weights_dtype() };
        expected.assert(backend, &outcome, format_args!("{lens:?}"));
        // keys and values are one tensor, so its bytes count once
        let tokens: usize = lens.iter().filter(|lens| lens.0 > 0).map(|lens| lens.1).sum();
        assert_eq!(
            plan.explain().kv_bytes_unique,
            tokens * (ckv + kpe) * kv_dtype.size(),
            "{}",
            plan.explain()
        );
    }
}

fn a_single_request_is_a_batch_of_one<B: Backend + Clone>(backends: &[B]) {
    // many rows, and keys that are split
    let (wide, long) = if crate::judge::stride() > 1 { (130, 333) } else { (1024, 999) };
    for (number, lens) in
        [(1, 54), (1, long), (37, long / 2), (wide, wide), (5, 2), (0, 3), (1, 0)].into_iter().enumerate()
    {
        let heads = [Heads { qo: 4, kv: 1 }, Heads { qo: 7, kv: 1 }, Heads { qo: 4, kv: 2 }][number % 3];
        let problem = Problem::builder(heads, HeadDim::same(64)).build().expect("it is sound");
        let sample = Sample::random(problem, &[lens], number as u64);
        let stored = Stored::new(&sample, Storage::Ragged, 0);
        for backend in backends {
            let batch = run(backend, &sample, &stored, Split::Balanced);
            let attention = Attention::new(problem, backend.clone()).expect("the backend can do it");
            let q = Elements::new(Dtype::F32, &sample.q);
            let mut o = Elements::filled(Dtype::F32, lens.0 * heads.qo * 64, f32::NAN);
            let mut lse = Elements::filled(Dtype::F32, lens.0 * heads.qo, f32::NAN);
            let (q, shape) = (q.view(&[lens.0, heads.qo, 64]), [lens.0, heads.qo]);
            let single = attention.run_single(
                q,
                stored.cache(),
                o.view_mut(&[lens.0, heads.qo, 64]),
                Some(lse.view_mut(&shape)),
            );
            single.expect("the tensors fit");
            let outcome =
                Outcome { o: o.to_f32(), lse: Some(lse.to_f32()), weights: attention.weights_dtype() };
            assert_eq!(outcome.bits(), batch.bits(), "{}: {lens:?}", backend.describe());
        }
    }
}

fn shards_of_keys_merge_to_the_whole<B: Backend + Clone>(backends: &[B]) {
    let lens = [(40, 200), (1, 333), (3, 3), (7, 1), (0, 20)];
    for (number, mask) in
        [Mask::Causal, Mask::Full, Mask::Window { left: 90, right: Some(0) }].into_iter().enumerate()
    {
        let problem = Problem::builder(Heads { qo: 6, kv: 2 }, HeadDim::same(64))
            .mask(mask)
            .build()
            .expect("it is sound");
        let sample = Sample::random(problem, &lens, number as u64);
        let expected = Expected::of(&sample);
        let (rows, heads) = (sample.num_rows(), 6);
        for backend in backends {
            let attention = Attention::new(problem, backend.clone()).expect("the backend can do it");
            // each rank holds a third of every request's keys
            let ranks = 3;
            let states: Vec<Outcome> = (0..ranks)
                .map(|rank| {
                    let part = |len: usize| len * rank / ranks..len * (rank + 1) / ranks;
                    let mut shard = sample.clone();
                    for (r, lens) in shard.lens.iter_mut().enumerate() {
                        let keys = part(sample.lens[r].1);
                        lens.1 = keys.len();
                        let of = |values: &[f32]| values[keys.start * 128..keys.end * 128].to_vec();
                        (shard.k[r], shard.v[r]) = (of(&sample.k[r]), of(&sample.v[r]));
                    }
                    let offsets: Vec<i64> = lens.iter().map(|lens| part(lens.1).start as i64).collect();
                    let totals: Vec<i64> = lens.iter().map(|lens| lens.1 as i64).collect();
                    let stored = Stored::new(&shard, Storage::Paged(5), rank as u64);
                    let shape = Shard { kv_offsets: (&offsets).into(), kv_lens: (&totals).into() };
                    let plan = attention.plan(&stored.batch().with_shard(shape)).expect("the batch is sound");
                    execute(&attention, &plan, (&shard, stored.cache()), &mut Workspace::default())
                })
                .collect();
            let by_row = |of: &dyn Fn(&Outcome) -> Vec<f32>, width: usize| -> Vec<f32> {
                let states: Vec<Vec<f32>> = states.iter().map(of).collect();
                (0..rows)
                    .flat_map(|row| {
                        states
                            .iter()
                            .flat_map(move |s| s[row * width..(row + 1) * width].to_vec())
                            .collect::<Vec<_>>()
                    })
                    .collect()
            };
            let o = Elements::F32(by_row(&|s| s.o.clone(), heads * 64));
            let lse = Elements::F32(by_row(&|s| s.lse.clone().expect("there is one"), heads));
            let mut merged = Elements::filled(Dtype::F32, rows * heads * 64, f32::NAN);
            let mut merged_lse = Elements::filled(Dtype::F32, rows * heads, f32::NAN);
            merge_states(
                backend,
                o.view(&[rows, ranks, heads, 64]),
                lse.view(&[rows, ranks, heads]),
                merged.view_mut(&[rows, heads, 64]),
                merged_lse.view_mut(&[rows, heads]),
            )
            .expect("the shapes fit");
            let outcome =
                Outcome { o: merged.to_f32(), lse: Some(merged_lse.to_f32()), weights: states[0].weights };
            expected.assert(backend, &outcome, format_args!("{mask}"));
        }
    }
}

crate::judge_backends!(
    absorbed_decode_agrees_with_the_oracle,
    an_8_bit_latent_cache_agrees_with_the_oracle,
    a_single_request_is_a_batch_of_one,
    shards_of_keys_merge_to_the_whole
);
crate::judge_bodies!(absorbed_decode_agrees_with_the_oracle);
