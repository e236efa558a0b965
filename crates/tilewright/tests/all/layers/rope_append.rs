//! Head norms, RoPE and append in one operator against the oracle: dtypes, head dims, layouts, skipped tokens, error texts.

use crate::arrays::{Array, F32_UNIT, Layout};
use tilewright::{
    Backend, Cpu, Dtype, Indices, KvCacheMut, KvLayout, Operator, PageTable, Result,
    kv::{
        AppendPlan,
        rope_append::{HeadNorms, RopeAppend},
    },
    reference::{
        norm::rmsnorm,
        rope::{frequency, rotate},
    },
    rope::{CosSinCache, Rope, RopeAngles, RopeStyle},
};

const QO_HEADS: usize = 5;
const KV_HEADS: usize = 2;
const PAGE_SIZE: usize = 4;
const NUM_PAGES: usize = 6;
const EPS: f32 = 1e-5;
/// Request and position of each token; -1 has no slot.
const TOKENS: [(i32, i32); 5] = [(1, 3), (0, 0), (-1, 7), (1, 4), (0, 5)];
/// Page and slot of each token.
const SLOTS: [Option<(usize, usize)>; 5] = [Some((4, 3)), Some((5, 0)), None, Some((1, 0)), Some((0, 1))];

/// A case: dtypes of the inputs and of the results, head dim, rotated dim.
#[derive(Debug, Clone, Copy)]
struct Case {
    dtypes: (Dtype, Dtype),
    dims: (usize, usize),
    style: RopeStyle,
    layout: KvLayout,
    normalized: bool,
}

fn cases() -> impl Iterator<Item = Case> {
    let dtypes = [
        (Dtype::F32, Dtype::Bf16),
        (Dtype::F32, Dtype::F32),
        (Dtype::Bf16, Dtype::Bf16),
        (Dtype::F16, Dtype::F16),
    ];
    // the last two are not computed by the kernel of one launch
    let shapes = [(64, 64), (128, 128), (256, 256), (128, 64), (24, 24)].map(|dims| (dims, RopeStyle::Neox));
    let shapes = shapes.into_iter().chain([((64, 64), RopeStyle::Interleaved)]);
    shapes.flat_map(move |(dims, style)| {
        let variants =
            [KvLayout::Nhd, KvLayout::Hnd].map(|layout| [true, false].map(|norms| (layout, norms)));
        dtypes.into_iter().flat_map(move |dtypes| {
            let case = move |(layout, normalized)| Case { dtypes, dims, style, layout, normalized };
            variants.into_iter().flatten().map(case)
        })
    })
}

/// The arguments of a case.
struct Arguments {
    case: Case,
    q: Array,
    k: Array,
    v: Array,
    weights: [Array; 2],
    out: [Array; 2],
    cache: [Array; 2],
    positions: Vec<i32>,
    angles: CosSinCache,
    /// Whether the table is passed as a tensor.
    from_tensor: bool,
}

impl Arguments {
    fn new(case: Case) -> Self {
        let Case { dtypes: (from, to), dims: (dim, rotary_dim), style, layout, .. } = case;
        let shape = |heads: usize| [TOKENS.len(), heads, dim];
        // padded rows of larger heads are not aligned as the kernel of one launch requires
        let memory = if dim == 64 { Layout::Padded } else { Layout::Dense };
        let random = |heads, seed| Array::random(from, &shape(heads), memory, seed);
        let rope = Rope::new(rotary_dim, 10_000.0).unwrap().with_style(style);
        let pages = layout.paged_shape(NUM_PAGES, PAGE_SIZE, KV_HEADS, dim);
        Self {
            case,
            q: random(QO_HEADS, 1),
            k: random(KV_HEADS, 2),
            v: random(KV_HEADS, 3),
            weights: [4, 5].map(|seed| Array::random(Dtype::F32, &[dim], Layout::Dense, seed)),
            out: [QO_HEADS, KV_HEADS].map(|heads| Array::zeros(to, &shape(heads), Layout::Dense)),
            cache: [0; 2].map(|_| Array::zeros(to, &pages, Layout::Dense)),
            positions: TOKENS.map(|(_, position)| 3 * position).to_vec(),
            angles: CosSinCache::new(&rope, 32).unwrap(),
            from_tensor: false,
        }
    }

    fn operator<'a>(&'a mut self, plan: &'a AppendPlan) -> RopeAppend<'a> {
        let [q_out, k_out] = &mut self.out;
        let [k_cache, v_cache] = &mut self.cache;
        let weights = self.weights.each_ref().map(Array::view);
        RopeAppend {
            q: self.q.view_mut(),
            k: self.k.view_mut(),
            v: self.v.view(),
            norms: self.case.normalized.then_some(HeadNorms { weights, eps: EPS }),
            positions: Indices::from(&self.positions[..]),
            angles: match self.from_tensor {
                true => RopeAngles::Tensor { table: self.angles.view(), style: self.case.style },
                false => RopeAngles::Table(&self.angles),
            },
            q_out: q_out.view_mut(),
            k_out: k_out.view_mut(),
            cache: KvCacheMut { k: k_cache.view_mut(), v: v_cache.view_mut() },
            layout: self.case.layout,
            plan,
        }
    }

    /// The rotated heads of a tensor, and the error of each element before it is rounded.
    fn rotated(&self, x: &Array, part: usize) -> (Vec<f64>, Vec<f64>) {
        let Case { dims: (dim, rotary_dim), style, normalized, .. } = self.case;
        let (mut expected, mut slack) = (Vec::new(), Vec::new());
        let frequencies: Vec<f64> =
            (0..rotary_dim / 2).map(|pair| frequency(pair, rotary_dim, 10_000.0)).collect();
        for (row, head) in x.values().chunks(dim).enumerate() {
            let head = match normalized {
                true => rmsnorm(head, &self.weights[part].values(), 0.0, f64::from(EPS)),
                false => head.to_vec(),
            };
            let position = f64::from(self.positions[row / x.shape[1]]);
            let angles: Vec<f64> = frequencies.iter().map(|frequency| position * frequency).collect();
            let max = head.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
            expected.extend(rotate(&head, &angles, style));
            // RoPE as in its own test; the sum of squares has `dim` terms, whose errors are halved by the root
            let of_sums = (8.0 + dim as f64) * F32_UNIT;
            // operators that run one after the other round the norm to the dtype of the input
            let of_norms = match (normalized, self.case.dtypes.0) {
                (true, Dtype::Bf16) => 2.0_f64.powi(-8),
                (true, Dtype::F16) => 2.0_f64.powi(-11),
                _ => 0.0,
            };
            slack.extend(vec![2.0 * max * (of_sums + of_norms); dim]);
        }
        (expected, slack)
    }
}

fn plan_of<B: Backend>(backend: &B, page_size: usize) -> Result<AppendPlan> {
    let table = PageTable::new(&[0, 2, 4], &[5, 0, 4, 1], &[4, 4], page_size);
    let (requests, positions): (Vec<i32>, Vec<i32>) = TOKENS.into_iter().unzip();
    AppendPlan::new(backend, &table, &requests, &positions)
}

fn queries_are_rotated_and_keys_and_values_appended<B: Backend>([backend]: &[B; 1]) {
    for case in cases() {
        let mut arguments = Arguments::new(case);
        let before = [&arguments.q, &arguments.k, &arguments.v].map(Clone::clone);
        let plan = plan_of(backend, PAGE_SIZE).unwrap();
        arguments.operator(&plan).run(backend).unwrap();
        let (expected, slack) = arguments.rotated(&before[0], 0);
        arguments.out[0].assert_close(&expected, |i| slack[i], &format!("queries of {case:?}"));
        let values = (before[2].values(), vec![0.0; before[2].values().len()]);
        for (cache, (new, new_slack)) in
            arguments.cache.iter().zip([arguments.rotated(&before[1], 1), values])
        {
            let mut expected = vec![0.0; cache.values().len()];
            let mut slack = expected.clone();
            let dim = case.dims.0;
            for (token, head) in
                (0..TOKENS.len()).flat_map(|token| (0..KV_HEADS).map(move |head| (token, head)))
            {
                let Some((page, slot)) = SLOTS[token] else { continue };
                let row = match case.layout {
                    KvLayout::Nhd => (page * PAGE_SIZE + slot) * KV_HEADS + head,
                    KvLayout::Hnd => (page * KV_HEADS + head) * PAGE_SIZE + slot,
                };
                let (from, to) = ((token * KV_HEADS + head) * dim, row * dim);
                expected[to..to + dim].copy_from_slice(&new[from..from + dim]);
                slack[to..to + dim].copy_from_slice(&new_slack[from..from + dim]);
            }
            cache.assert_close(&expected, |i| slack[i], &format!("the cache of {case:?}"));
        }
    }
}

fn tables_in_tensors_give_the_same_bits<B: Backend>([backend]: &[B; 1]) {
    for case in cases() {
        let plan = plan_of(backend, PAGE_SIZE).unwrap();
        let [of_table, of_tensor] = [false, true].map(|from_tensor| {
            let mut arguments = Arguments { from_tensor, ..Arguments::new(case) };
            arguments.operator(&plan).run(backend).unwrap();
            let Arguments { out: [q, _], cache: [k_cache, v_cache], .. } = arguments;
            [q, k_cache, v_cache].map(|array| array.values())
        });
        assert_eq!(of_tensor, of_table, "{case:?}");
    }
}

/// The error of the operator after `change`, which may use an f32 array of this shape.
fn error_of(shape: &[usize], change: impl for<'a> FnOnce(&mut RopeAppend<'a>, &'a Array)) -> String {
    let (cpu, case) = (Cpu::new(), cases().next().expect("a case"));
    let plan = plan_of(&cpu, PAGE_SIZE).unwrap();
    let (other, mut arguments) = (Array::zeros(Dtype::F32, shape, Layout::Dense), Arguments::new(case));
    let mut operator = arguments.operator(&plan);
    change(&mut operator, &other);
    operator.run(&cpu).expect_err("an error").to_string()
}

#[test]
fn errors_name_the_argument() {
    let text = error_of(&[32], |operator, weight| {
        operator.norms = Some(HeadNorms { weights: [weight.view(); 2], eps: EPS });
    });
    assert_eq!(text, "kv.rope_append: weight has shape [32], expected [head_dim] = [64]");
    let text = error_of(&[1], |operator, _| operator.positions = Indices::from(&[0; 4]));
    assert_eq!(text, "kv.rope_append: positions has 4 elements, expected tokens = 5");
    let text = error_of(&[1], |operator, _| operator.positions = Indices::from(&[0, 0, 0, 0, 32]));
    assert_eq!(text, "kv.rope_append: token 4: position = 32 is not in 0..32");
    let text = error_of(&[32, 63], |operator, table| {
        operator.angles = RopeAngles::Tensor { table: table.view(), style: RopeStyle::Neox };
    });
    let expected = "expected [max_positions, rotary_dim] with an even rotary_dim above 0";
    assert_eq!(text, format!("kv.rope_append: cos_sin_cache has shape [32, 63], {expected}"));
    let text = error_of(&[21, 64], |operator, table| {
        operator.angles = RopeAngles::Tensor { table: table.view(), style: RopeStyle::Neox };
    });
    assert_eq!(text, "kv.rope_append: token 2: position = 21 is not in 0..21");
    let text = error_of(&[5, 3, 64], |operator, values| operator.v = values.view());
    assert!(text.starts_with("kv.rope_append: v has shape [5, 3, 64]"), "{text}");
    let (cpu, case) = (Cpu::new(), cases().next().expect("a case"));
    let (plan, mut arguments) = (plan_of(&cpu, 8).unwrap(), Arguments::new(case));
    let text = arguments.operator(&plan).run(&cpu).expect_err("another page size").to_string();
    assert!(text.starts_with("kv.rope_append: cache k has shape"), "{text}");
}

crate::judge_backends!(
    queries_are_rotated_and_keys_and_values_appended,
    tables_in_tensors_give_the_same_bits
);
