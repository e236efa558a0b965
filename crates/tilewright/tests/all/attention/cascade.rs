//! Cascades: shared prefixes as explicit or detected levels, flat or nested, against the oracle on the plain requests.

use crate::{Elements, Expected, Generator, Lens, PagedRequests, Sample, execute};
use std::ops::Range;
use tilewright::{
    Attention, Backend, Batch, Dtype, HeadDim, Heads, KvCache, KvLayout, Mask, PageTable, Plan, Problem,
    Workspace,
    attention::{
        BitOrder, Level, Merge, PackedMask, Split, packbits,
        variant::{Alibi, Both, RotaryEmbedding, SoftCap},
    },
    reference::{
        attention::{Definition, LogitIndex},
        rope::frequency,
        variant::{alibi_slopes, rotary_embedding},
    },
    rope::Rope,
};

/// Requests `(qo_len, own tokens)` and the runs of full pages that groups of them share, outermost first.
#[derive(Debug, Clone)]
struct Family {
    page_size: usize,
    lens: Vec<Lens>,
    shared: Vec<(Range<usize>, usize)>,
}

/// A family in a pool; each shared page is stored once.
struct Pool {
    sample: Sample,
    qo_indptr: Vec<i32>,
    /// For each run of `Family::shared`, its pages.
    shared: Vec<Vec<i32>>,
    own: Vec<Vec<i32>>,
    k: Elements,
    v: Elements,
    pages: usize,
}

impl Family {
    /// The number of pages of request `r` in the runs before `run`.
    fn before(&self, r: usize, run: usize) -> usize {
        self.shared[..run].iter().filter(|(group, _)| group.contains(&r)).map(|(_, pages)| pages).sum()
    }

    fn pool(&self, problem: Problem, seed: u64) -> Pool {
        let kv_len = |r: usize| self.before(r, self.shared.len()) * self.page_size + self.lens[r].1;
        let lens: Vec<Lens> = (0..self.lens.len()).map(|r| (self.lens[r].0, kv_len(r))).collect();
        let mut sample = Sample::random(problem, &lens, seed);
        let (heads, dim) = (problem.heads().kv, problem.head_dim());
        for (run, (group, pages)) in self.shared.iter().enumerate() {
            for r in group.clone().skip(1) {
                let (from, to) = (self.before(group.start, run), self.before(r, run));
                for (tensor, width) in [(&mut sample.k, heads * dim.qk), (&mut sample.v, heads * dim.vo)] {
                    let part = |first: usize| {
                        first * self.page_size * width..(first + pages) * self.page_size * width
                    };
                    let values = tensor[group.start][part(from)].to_vec();
                    tensor[r][part(to)].copy_from_slice(&values);
                }
            }
        }
        let own = |r: usize| self.lens[r].1.div_ceil(self.page_size);
        let total = self.shared.iter().map(|(_, pages)| pages).sum::<usize>()
            + (0..lens.len()).map(own).sum::<usize>();
        let mut ids = Generator::new(seed).permutation(total + 3).into_iter().map(|page| page as i32);
        let shared: Vec<Vec<i32>> =
            self.shared.iter().map(|(_, pages)| ids.by_ref().take(*pages).collect()).collect();
        let own: Vec<Vec<i32>> = (0..lens.len()).map(|r| ids.by_ref().take(own(r)).collect()).collect();
        let fill = |tensor: &[Vec<f32>], width: usize| {
            let mut elements =
                Elements::filled(problem.dtype_kv(), (total + 3) * self.page_size * width, f32::NAN);
            for (r, values) in tensor.iter().enumerate() {
                let pages = self.flat(r, &shared, &own);
                for (at, token) in values.chunks_exact(width).enumerate() {
                    let slot = pages[at / self.page_size] as usize * self.page_size + at % self.page_size;
                    elements.write(slot * width, token);
                }
            }
            elements
        };
        let (k, v) = (fill(&sample.k, heads * dim.qk), fill(&sample.v, heads * dim.vo));
        let PagedRequests { qo_indptr, .. } = PagedRequests::new(&lens, self.page_size);
        Pool { sample, qo_indptr, shared, own, k, v, pages: total + 3 }
    }

    /// All pages of request `r`.
    fn flat(&self, r: usize, shared: &[Vec<i32>], own: &[Vec<i32>]) -> Vec<i32> {
        let runs = self.shared.iter().zip(shared).filter(|((group, _), _)| group.contains(&r));
        runs.flat_map(|(_, pages)| pages).chain(&own[r]).copied().collect()
    }
}

/// The arrays of requests with these pages and numbers of tokens.
fn table_of(requests: impl IntoIterator<Item = (Vec<i32>, usize)>, page_size: usize) -> PagedRequests {
    let (pages, lens): (Vec<_>, Vec<Lens>) =
        requests.into_iter().map(|(pages, tokens)| (pages, (0, tokens))).unzip();
    PagedRequests { indices: pages.concat(), ..PagedRequests::new(&lens, page_size) }
}

impl Pool {
    fn cache(&self, page_size: usize) -> KvCache<'_> {
        let (heads, dim) = (self.sample.problem.heads().kv, self.sample.problem.head_dim());
        let shape = |dim| KvLayout::Nhd.paged_shape(self.pages, page_size, heads, dim);
        KvCache { k: self.k.view(&shape(dim.qk)), v: self.v.view(&shape(dim.vo)) }
    }

    /// Plans and runs the family with detected levels and with explicit ones; `check` receives every plan.
    fn judge<B: Backend + Clone>(
        &self,
        family: &Family,
        backend: &B,
        split: Split,
        check: impl Fn(&Plan, bool),
    ) {
        let attention = Attention::new(self.sample.problem, backend.clone()).expect("the backend can do it");
        self.judge_by((&attention, &Expected::of(&self.sample), backend), family, split, check);
    }

    /// [`Pool::judge`] for an operator with a variant.
    fn judge_by<B: Backend>(
        &self,
        (attention, expected, backend): (&Attention<B>, &Expected, &B),
        family: &Family,
        split: Split,
        check: impl Fn(&Plan, bool),
    ) {
        let page_size = family.page_size;
        let requests = 0..family.lens.len();
        let flat = |r| (family.flat(r, &self.shared, &self.own), self.sample.lens[r].1);
        let flat = table_of(requests.clone().map(flat), page_size);
        let own = table_of(requests.map(|r| (self.own[r].clone(), family.lens[r].1)), page_size);
        // one level per run: its group, and groups without keys before and after
        let rows = |r: usize| self.qo_indptr[r];
        let levels: Vec<([i32; 2], PagedRequests)> = family
            .shared
            .iter()
            .zip(&self.shared)
            .map(|((group, pages), ids)| {
                let nothing = (Vec::new(), 0);
                let run = (ids.clone(), pages * page_size);
                ([rows(group.start), rows(group.end)], table_of([nothing, run], page_size))
            })
            .collect();
        let indptrs: Vec<[i32; 3]> = levels.iter().map(|(rows, _)| [0, rows[0], rows[1]]).collect();
        let levels: Vec<Level<'_>> = levels
            .iter()
            .zip(&indptrs)
            .map(|((_, table), qo_indptr)| Level { qo_indptr: qo_indptr.into(), table: table.table() })
            .collect();
        let found = Batch::paged(&self.qo_indptr, flat.table()).with_shared_prefixes();
        let given = Batch::paged(&self.qo_indptr, own.table()).with_levels(&levels);
        for (batch, given) in [(found, false), (given, true)] {
            let plan = attention.plan_with(&batch, split).expect("the batch is sound");
            check(&plan, given);
            let tensors = (&self.sample, self.cache(page_size));
            let outcome = execute(attention, &plan, tensors, &mut Workspace::default());
            let case = format_args!("{}, {split:?}, given {given}\n{family:?}", self.sample.problem);
            expected.assert(backend, &outcome, case);
        }
    }
}

fn problem(group: usize, dtype: Dtype, mask: Mask) -> Problem {
    let heads = Heads { qo: 2 * group, kv: 2 };
    Problem::builder(heads, HeadDim { qk: 64, vo: 48 })
        .dtypes(dtype, dtype)
        .mask(mask)
        .build()
        .expect("it is sound")
}

/// FlashInfer's grid of shared prefixes (decode and append; unique 37 and 17; shared 128, 512), nested ones, groups in the
/// middle of a batch, requests without rows and without own keys.
fn families() -> Vec<Family> {
    let mut families = Vec::new();
    for (requests, unique, shared, page_size) in
        [(12, 37, 128, 1), (12, 17, 512, 16), (17, 37, 512, 16), (17, 17, 128, 16)]
    {
        for qo_len in [1, unique] {
            let lens = vec![(qo_len, unique); requests];
            families.push(Family { page_size, lens, shared: vec![(0..requests, shared / page_size)] });
        }
    }
    families.push(Family {
        page_size: 5,
        lens: vec![(1, 3), (2, 0), (1, 64), (0, 7), (1, 1), (70, 70), (1, 9), (3, 2)],
        shared: vec![(0..7, 30), (0..4, 13), (5..7, 1), (0..2, 40), (2..4, 2)],
    });
    families.push(Family {
        page_size: 16,
        lens: vec![(1, 5), (1, 500), (1, 20), (1, 4), (1, 33), (1, 1)],
        shared: vec![(1..4, 20), (4..6, 9), (2..4, 20)],
    });
    // an empty request restricts no group, regardless of its batch peers' prefixes
    families.push(Family {
        page_size: 4,
        lens: vec![(1, 3), (0, 9), (2, 4)],
        shared: vec![(0..1, 2), (2..3, 2), (0..3, 30)],
    });
    families
}

fn levels_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let masks = [
        Mask::Causal,
        Mask::Full,
        Mask::Window { left: 100, right: Some(0) },
        Mask::Window { left: 3, right: None },
    ];
    for (number, family) in crate::judge::subset(families().iter().enumerate()) {
        let (group, dtype) = ([1, 4, 3, 8][number % 4], [Dtype::F32, Dtype::Bf16][number / 4 % 2]);
        let pool = family.pool(problem(group, dtype, masks[number % 4]), number as u64);
        for (backend, split) in
            backends.iter().flat_map(|b| [Split::Balanced, Split::Fixed { tokens: 128 }].map(|s| (b, s)))
        {
            pool.judge(family, backend, split, |_, _| {});
        }
    }
}

/// Levels of many rows beside own keys in one piece or several, prompts and levels of few rows. A launch merges rows with both.
fn levels_beside_own_keys<B: Backend + Clone>(backends: &[B]) {
    let families = [
        (vec![(1, 20); 20], vec![(0..20, 10)]),
        ([vec![(1, 5); 4], vec![(1, 900), (2, 0), (30, 40), (1, 64)]].concat(), vec![(0..8, 12), (0..3, 5)]),
    ];
    for (number, (lens, shared)) in families.into_iter().enumerate() {
        let family = Family { page_size: 16, lens, shared };
        let problem = Problem::builder(Heads { qo: 8, kv: 2 }, HeadDim::same(64));
        let problem = problem.dtypes(Dtype::Bf16, Dtype::Bf16).mask([Mask::Full, Mask::Causal][number]);
        let pool = family.pool(problem.build().expect("it is sound"), number as u64);
        for (backend, split) in
            backends.iter().flat_map(|b| [Split::Balanced, Split::Fixed { tokens: 128 }].map(|s| (b, s)))
        {
            pool.judge(&family, backend, split, |plan, given| {
                let schedule = plan.schedule();
                let of_runs = |at: &u32| schedule.runs().contains(&schedule.items[*at as usize]);
                let is_mixed = |merge: &Merge| {
                    let sources = &schedule.sources[merge.sources.start as usize..merge.sources.end as usize];
                    let is_mixed = sources.iter().any(of_runs) && !sources.iter().all(of_runs);
                    assert_eq!(schedule.arrivals(merge).is_empty(), is_mixed, "{merge:?}");
                    is_mixed
                };
                let expected = given && plan.tiling().many_rows.is_some();
                assert!(!expected || schedule.merges.iter().any(is_mixed), "{plan:?}");
            });
        }
    }
}

/// A level in more pieces than a warp has lanes, whose states are merged in several batches.
fn a_level_in_many_pieces<B: Backend + Clone>(backends: &[B]) {
    let family = Family { page_size: 16, lens: vec![(1, 5); 5], shared: vec![(0..5, 34 * 12)] };
    let problem =
        Problem::builder(Heads { qo: 4, kv: 1 }, HeadDim::same(64)).dtypes(Dtype::Bf16, Dtype::Bf16);
    let pool = family.pool(problem.build().expect("it is sound"), 0);
    for backend in backends {
        pool.judge(&family, backend, Split::Fixed { tokens: 192 }, |plan, _| {
            let merges = &plan.schedule().merges;
            assert!(merges.iter().all(|merge| merge.sources.len() > 33), "{plan:?}");
        });
    }
}

/// RoPE, ALiBi and a soft cap depend on positions, which count through all levels.
fn variant_positions_count_through_all_levels<B: Backend + Clone>(backends: &[B]) {
    let window = Mask::Window { left: 70, right: Some(0) };
    for (number, family) in crate::judge::subset(families().iter().enumerate()) {
        let mask = [window, Mask::Causal, Mask::Full][number % 3];
        let group = [1, 4, 3][number % 3];
        let pool = family.pool(problem(group, Dtype::F32, mask), number as u64);
        let (heads, dim) = (pool.sample.problem.heads(), pool.sample.problem.head_dim());
        let slopes = alibi_slopes(heads.qo);
        let frequencies: Vec<f64> = (0..dim.qk / 2).map(|pair| frequency(pair, dim.qk, 1e4)).collect();
        let definition = |_| Definition {
            logit: Box::new(|at, s| 30.0 * ((s + slopes[at.h] * (at.j as f64 - at.p as f64)) / 30.0).tanh()),
            ..rotary_embedding(&frequencies)
        };
        let expected = Expected::by(&pool.sample, &definition);
        let rope = Rope::new(dim.qk, 1e4).and_then(|rope| RotaryEmbedding::new(&rope)).expect("it is sound");
        let cap = SoftCap::new(30.0).expect("it is above 0");
        let variant = Both::new(rope, Both::new(Alibi::new(heads.qo), cap));
        for backend in backends {
            let attention = Attention::with_variant(pool.sample.problem, variant.clone(), backend.clone());
            let attention = attention.expect("the variant is sound");
            pool.judge_by((&attention, &expected, backend), family, Split::Balanced, |_, _| {});
        }
    }
}

fn random_families_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let mut generator = Generator::new(5);
    for number in crate::judge::subset(0..60) {
        let count = 2 + generator.below(7);
        let lens: Vec<Lens> = (0..count).map(|_| (generator.below(4), generator.below(90))).collect();
        let mut shared: Vec<(Range<usize>, usize)> = Vec::new();
        for _ in 0..generator.below(5) {
            let start = generator.below(count - 1);
            let group = start..start + 2 + generator.below(count - start - 1);
            // nested in, or disjoint from, all previous groups
            let fits = |other: &Range<usize>| {
                group.end <= other.start
                    || other.end <= group.start
                    || (other.start <= group.start && group.end <= other.end)
            };
            if shared.iter().all(|(other, _)| fits(other)) {
                shared.push((group, 1 + generator.below(12)));
            }
        }
        let family = Family { page_size: generator.pick(&[1, 5, 16]), lens, shared };
        let mask = generator.pick(&[Mask::Causal, Mask::Full, Mask::Window { left: 60, right: Some(0) }]);
        let pool = family.pool(problem(generator.pick(&[1, 2, 4]), Dtype::F32, mask), number);
        let split = generator.pick(&[Split::Balanced, Split::Never, Split::Fixed { tokens: 64 }]);
        backends.iter().for_each(|backend| pool.judge(&family, backend, split, |_, _| {}));
    }
}

pub(super) fn a_long_prefix_becomes_a_level_and_is_read_once<B: Backend + Clone>(backends: &[B]) {
    let family = Family { page_size: 16, lens: vec![(1, 40); 64], shared: vec![(0..64, 64)] };
    let pool = family.pool(problem(4, Dtype::Bf16, Mask::Causal), 1);
    for backend in backends {
        pool.judge(&family, backend, Split::Balanced, |plan, given| {
            let explanation = plan.explain();
            // KV tiles per worker without a level, which a device with a kernel of its own for levels compares with its launch
            let alone = 64 * 16 * 2 / plan.tiling().workers;
            let pays = plan.tiling().many_rows.is_none_or(|many| many.level_overhead < alone);
            if !given {
                let [prefix] = &explanation.prefixes[..] else { panic!("one prefix: {explanation}") };
                assert_eq!(
                    (&prefix.requests, &prefix.tokens, prefix.is_level()),
                    (&(0..64), &(0..1024), pays)
                );
                let decision = if pays { "a level" } else { "not worth a level" };
                let text = format!("requests 0..64 share tokens 0..1024: {decision}, cost ");
                assert!(explanation.to_string().contains(&text), "{explanation}");
            }
            if !given && !pays {
                return;
            }
            // a tile of query rows smaller than the family loads the prefix again
            let tiles = (64 * plan.problem().heads().group()).div_ceil(plan.tiling().q_rows);
            let prefix = tiles.saturating_sub(1) * 1024 * 2 * (64 + 48) * 2;
            let ratio = (explanation.kv_bytes - prefix) as f64 / explanation.kv_bytes_unique as f64;
            assert!(ratio <= 1.15, "{ratio}: {explanation}");
            // the prefix once, 40 own tokens per request
            assert_eq!(explanation.kv_bytes_unique, (1024 + 64 * 40) * 2 * (64 + 48) * 2, "{explanation}");
        });
    }
}

fn a_short_shared_prefix_stays_flat<B: Backend + Clone>(backends: &[B]) {
    let family = Family { page_size: 1, lens: vec![(40, 40); 2], shared: vec![(0..2, 1)] };
    let pool = family.pool(problem(4, Dtype::F32, Mask::Causal), 1);
    for backend in backends {
        pool.judge(&family, backend, Split::Balanced, |plan, given| {
            let explanation = plan.explain();
            if !given {
                assert!(!explanation.prefixes[0].is_level(), "{explanation}");
                assert!(
                    explanation.to_string().contains("share tokens 0..1: not worth a level, cost "),
                    "{explanation}"
                );
            }
        });
    }
}

fn pages_under_a_packed_mask_are_not_shared<B: Backend + Clone>(backends: &[B]) {
    let family = Family { page_size: 16, lens: vec![(2, 20); 4], shared: vec![(0..4, 64)] };
    let pool = family.pool(problem(4, Dtype::F32, Mask::Full), 3);
    // bits for the last 50 of 1044 keys, which begin inside the page at 992
    let (rows, kv_len, columns) = (2, 1044, [50; 4]);
    let mut generator = Generator::new(4);
    let flags: Vec<Vec<bool>> =
        (0..4).map(|_| (0..rows * 50).map(|_| generator.below(2) == 0).collect()).collect();
    let bytes: Vec<u8> = flags.iter().flat_map(|flags| packbits(flags, BitOrder::Little)).collect();
    let expected = Expected::by(&pool.sample, &|r| {
        let flags = &flags[r];
        let visible = move |at: LogitIndex| at.j < kv_len - 50 || flags[at.i * 50 + at.j - (kv_len - 50)];
        Definition { visible: Box::new(visible), ..Definition::default() }
    });
    let table = |r| (family.flat(r, &pool.shared, &pool.own), kv_len);
    let table = table_of((0..4).map(table), 16);
    let batch = Batch::paged(&pool.qo_indptr, table.table()).with_shared_prefixes();
    let batch = batch.with_mask(PackedMask::last(&bytes, &columns));
    for backend in backends {
        let attention = Attention::new(pool.sample.problem, backend.clone()).expect("the backend can do it");
        let plan = attention.plan(&batch).expect("the batch is sound");
        let prefix = &plan.explain().prefixes[0];
        assert!(prefix.is_level() && prefix.tokens == (0..992), "{}", plan.explain());
        let outcome = execute(&attention, &plan, (&pool.sample, pool.cache(16)), &mut Workspace::default());
        expected.assert(backend, &outcome, format_args!("{family:?}"));
    }
}

fn partial_pages_are_not_shared<B: Backend + Clone>(backends: &[B]) {
    // 16 forks of one request, which has 100 full pages and a part of another
    let indices: Vec<i32> = (0..16).flat_map(|_| 0..101).collect();
    let (qo_indptr, indptr): (Vec<i32>, Vec<i32>) = (0..=16).map(|r| (r, r * 101)).unzip();
    let table = PageTable::new(&indptr, &indices, &[10; 16], 16);
    for backend in backends {
        let problem = problem(4, Dtype::F32, Mask::Causal);
        let attention = Attention::new(problem, backend.clone()).expect("the backend can do it");
        let plan = attention
            .plan(&Batch::paged(&qo_indptr, table).with_shared_prefixes())
            .expect("the batch is sound");
        let explanation = plan.explain();
        let [prefix] = &explanation.prefixes[..] else { panic!("one prefix: {explanation}") };
        assert!(prefix.is_level() && prefix.tokens == (0..1600), "{explanation}");
    }
}

crate::judge_backends!(
    pages_under_a_packed_mask_are_not_shared,
    partial_pages_are_not_shared,
    levels_agree_with_the_oracle,
    levels_beside_own_keys,
    a_level_in_many_pieces,
    variant_positions_count_through_all_levels,
    random_families_agree_with_the_oracle,
    a_long_prefix_becomes_a_level_and_is_read_once,
    a_short_shared_prefix_stays_flat
);
crate::judge_bodies!(levels_beside_own_keys, a_level_in_many_pieces);
