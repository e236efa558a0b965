//! Quantizing append: given scales against the f64 definition, dynamic scales against their error bound.

use crate::{Elements, Generator, half_ulp};
use tilewright::{
    Backend, Dtype, KvCacheMut, KvLayout, PageTable, Result, Scale, View, ViewMut,
    kv::{
        ScaleMut,
        append::{NewTokens, QuantizedCacheMut, append_paged_kv_cache_quantized},
        mla::{MlaCacheMut, NewMlaTokens, append_paged_mla_kv_cache},
    },
    reference::quantization::quantize,
};

const DTYPES: [Dtype; 3] = [Dtype::E4m3, Dtype::E5m2, Dtype::I8];
const LAYOUTS: [KvLayout; 2] = [KvLayout::Nhd, KvLayout::Hnd];
const HEADS: usize = 3;
const DIMS: [usize; 2] = [9, 5];
const PAGES: usize = 6;
const PAGE_SIZE: usize = 4;
/// Two requests of 7 and 5 tokens.
const TABLE: (&[i32], &[i32], &[i32]) = (&[0, 2, 4], &[4, 1, 0, 5], &[3, 1]);

/// K and V of a pool, filled with a sentinel value.
struct Pool {
    layout: KvLayout,
    memory: [Elements; 2],
}

/// One token: its request and position, and its K and V, `[heads, dim]` each.
type Token = (i32, i32, [Vec<f32>; 2]);

impl Pool {
    fn new(dtype: Dtype, layout: KvLayout) -> Self {
        Self {
            layout,
            memory: DIMS.map(|dim| Elements::filled(dtype, PAGES * PAGE_SIZE * HEADS * dim, -13.0)),
        }
    }

    fn append<B: Backend>(&mut self, backend: &B, tokens: &[Token], [k, v]: [ScaleMut<'_>; 2]) -> Result<()> {
        let dense = [0, 1]
            .map(|t| Elements::F32(tokens.iter().flat_map(|token| token.2[t].iter().copied()).collect()));
        let view = |t: usize| dense[t].view(&[tokens.len(), HEADS, DIMS[t]]);
        let new = NewTokens {
            k: view(0),
            v: view(1),
            batch_indices: &tokens.iter().map(|token| token.0).collect::<Vec<_>>(),
            positions: &tokens.iter().map(|token| token.1).collect::<Vec<_>>(),
        };
        let shapes = DIMS.map(|dim| self.layout.paged_shape(PAGES, PAGE_SIZE, HEADS, dim));
        let [k_memory, v_memory] = &mut self.memory;
        let cache = KvCacheMut { k: k_memory.view_mut(&shapes[0]), v: v_memory.view_mut(&shapes[1]) };
        let target = QuantizedCacheMut { cache, k_scale: k, v_scale: v };
        let table = PageTable::new(TABLE.0, TABLE.1, TABLE.2, PAGE_SIZE);
        append_paged_kv_cache_quantized(backend, &new, target, self.layout, &table)
    }

    /// The stored elements of K (0) or V (1).
    fn stored(&self, t: usize, (page, slot, head): (usize, usize, usize)) -> Vec<f32> {
        let row = match self.layout {
            KvLayout::Nhd => (page * PAGE_SIZE + slot) * HEADS + head,
            KvLayout::Hnd => (page * HEADS + head) * PAGE_SIZE + slot,
        };
        self.memory[t].to_f32()[row * DIMS[t]..(row + 1) * DIMS[t]].to_vec()
    }
}

fn place(request: i32, position: i32) -> (usize, usize) {
    let entry = TABLE.0[request as usize] as usize + position as usize / PAGE_SIZE;
    (TABLE.1[entry] as usize, position as usize % PAGE_SIZE)
}

fn token(generator: &mut Generator, request: i32, position: i32, size: f32) -> Token {
    let row = |dim: usize, generator: &mut Generator| {
        generator.reals(HEADS * dim).iter().map(|v| v * size).collect()
    };
    (request, position, [row(DIMS[0], generator), row(DIMS[1], generator)])
}

/// A different scale for each page and head.
fn factors(per_page: usize) -> Elements {
    Elements::F32((0..PAGES * per_page).map(|at| 0.01 * (at + 1) as f32).collect())
}

fn given_scales_divide_and_round<B: Backend>(backends: &[B]) {
    let (per_page, per_head) = (factors(1), factors(HEADS));
    let heads = [0.5, 0.01, 3.0];
    let values = |count: usize| Scale::Values(View::new(&heads[..count], &[count]).expect("a view"));
    let scales: [(Scale<'_>, &dyn Fn(usize, usize) -> f32); 8] = [
        (Scale::One, &|_, _| 1.0),
        (Scale::Tensor(0.03), &|_, _| 0.03),
        (Scale::Tensor(1e-4), &|_, _| 1e-4),
        (Scale::Head(&heads), &|_, head| heads[head]),
        (values(1), &|_, _| heads[0]),
        (values(HEADS), &|_, head| heads[head]),
        (Scale::Page(per_page.view(&[PAGES])), &|page, _| 0.01 * (page + 1) as f32),
        (Scale::Page(per_head.view(&[PAGES, HEADS])), &|page, head| 0.01 * (page * HEADS + head + 1) as f32),
    ];
    let mut generator = Generator::new(9);
    let at = [(1, 4), (0, 0), (0, 5), (-1, 77), (0, 3), (1, 0)];
    let tokens: Vec<Token> = at.map(|(r, position)| token(&mut generator, r, position, 4.0)).into();
    for (dtype, layout) in DTYPES.iter().flat_map(|&dtype| LAYOUTS.map(|layout| (dtype, layout))) {
        for (backend, (scale, factor)) in backends.iter().flat_map(|b| scales.iter().map(move |s| (b, s))) {
            let mut pool = Pool::new(dtype, layout);
            // V and K have different kinds of scale
            let both = [ScaleMut::Static(*scale), ScaleMut::Static(Scale::Tensor(0.5))];
            pool.append(backend, &tokens, both).expect("the scales fit");
            let mut written = 0;
            for (request, position, values) in tokens.iter().filter(|token| token.0 >= 0) {
                let (page, slot) = place(*request, *position);
                for (t, head) in [0, 1].iter().flat_map(|&t| (0..HEADS).map(move |head| (t, head))) {
                    let factor = if t == 0 { factor(page, head) } else { 0.5 };
                    let stored = pool.stored(t, (page, slot, head));
                    for (got, value) in stored.iter().zip(&values[t][head * DIMS[t]..]) {
                        let quotient = f64::from(*value) / f64::from(factor);
                        let error = (quantize(dtype, quotient) - quotient).abs();
                        // the f32 division may cross a rounding midpoint
                        let allowed = error + quotient.abs() * 2f64.powi(-23);
                        assert!((f64::from(*got) - quotient).abs() <= allowed, "{got} is not {quotient}");
                        written += 1;
                    }
                }
            }
            assert_eq!(written, 5 * HEADS * (DIMS[0] + DIMS[1]));
            let elements = pool.memory.iter().flat_map(Elements::to_f32);
            let untouched = elements.filter(|v| f64::from(*v) == quantize(dtype, -13.0)).count();
            assert!(untouched >= PAGES * PAGE_SIZE * HEADS * (DIMS[0] + DIMS[1]) - written, "nothing else");
        }
    }
}

/// The true value of a stored element and its accumulated error bound.
#[derive(Clone, Copy)]
struct TrackedElement {
    value: f64,
    error: f64,
}

impl TrackedElement {
    /// Adds the error of one more rounding to steps of `scale`.
    fn round(&mut self, dtype: Dtype, scale: f64) {
        let largest = (self.value.abs() + self.error) / scale;
        self.error += half_ulp(dtype, largest) * scale + largest * scale * 2f64.powi(-22);
    }
}

/// Appends tokens of growing and shrinking magnitude, alone and together, and tracks every element.
fn dynamic_scales_stay_within_their_error_bound<B: Backend>(backends: &[B]) {
    let steps: [&[(i32, i32, f32)]; 7] = [
        &[(0, 0, 1.0)],
        &[(0, 1, 0.5), (1, 0, 0.0)],
        &[(0, 2, 3.0), (1, 1, 7.0), (1, 2, 1e-3)],
        &[(0, 3, 2.9), (-1, 0, 1e9)],
        &[(0, 4, 1e-30), (0, 5, 1e-3)],
        &[(0, 6, 1e20), (1, 3, 9.0)],
        &[(1, 4, 1.0)],
    ];
    for (dtype, layout) in DTYPES.iter().flat_map(|&dtype| LAYOUTS.map(|layout| (dtype, layout))) {
        for backend in backends {
            let mut generator = Generator::new(3);
            let mut pool = Pool::new(dtype, layout);
            let mut scales = [0, 1].map(|_| Elements::filled(Dtype::F32, PAGES * HEADS, 0.0));
            let mut known: Vec<(usize, [usize; 3], Vec<TrackedElement>)> = Vec::new();
            for step in steps {
                let tokens: Vec<Token> =
                    step.iter().map(|&(r, at, size)| token(&mut generator, r, at, size)).collect();
                let before = scales.clone().map(|scales| scales.to_f32());
                let [k, v] = &mut scales;
                let shape = [PAGES, HEADS];
                let both = [k.view_mut(&shape), v.view_mut(&shape)].map(ScaleMut::Dynamic);
                pool.append(backend, &tokens, both).expect("the scales fit");
                let after = scales.clone().map(|scales| scales.to_f32());
                for (t, [page, _, head], elements) in &mut known {
                    let at = *page * HEADS + *head;
                    if after[*t][at] != before[*t][at] {
                        elements.iter_mut().for_each(|known| known.round(dtype, f64::from(after[*t][at])));
                    }
                }
                for (r, position, values) in tokens.iter().filter(|token| token.0 >= 0) {
                    let (page, slot) = place(*r, *position);
                    for (t, head) in [0, 1].iter().flat_map(|&t| (0..HEADS).map(move |head| (t, head))) {
                        let row = &values[t][head * DIMS[t]..(head + 1) * DIMS[t]];
                        let new = row.iter().map(|&value| {
                            let mut known = TrackedElement { value: f64::from(value), error: 0.0 };
                            known.round(dtype, f64::from(after[t][page * HEADS + head]));
                            known
                        });
                        known.push((t, [page, slot, head], new.collect()));
                    }
                }
                check_scales(dtype, &known, &after);
                for (t, [page, slot, head], elements) in &known {
                    let scale = f64::from(after[*t][page * HEADS + head]);
                    for (got, known) in pool.stored(*t, (*page, *slot, *head)).iter().zip(elements) {
                        let off = (f64::from(*got) * scale - known.value).abs();
                        assert!(off <= known.error, "{dtype}: {got} · {scale} is not {}", known.value);
                    }
                }
            }
            // the table counts three slots of page 1: the fourth is not requantized when the scale grows
            for (t, head) in [0, 1].iter().flat_map(|&t| (0..HEADS).map(move |head| (t, head))) {
                let garbage = quantize(dtype, -13.0) as f32;
                assert_eq!(pool.stored(t, (1, 3, head)), vec![garbage; DIMS[t]]);
            }
        }
    }
}

/// Each scale is that of the maximum magnitude in its page and head, 0 without tokens.
fn check_scales(dtype: Dtype, known: &[(usize, [usize; 3], Vec<TrackedElement>)], scales: &[Vec<f32>; 2]) {
    for (t, page, head) in
        [0, 1].iter().flat_map(|&t| (0..PAGES).flat_map(move |page| (0..HEADS).map(move |h| (t, page, h))))
    {
        let mut rows = known.iter().filter(|k| k.0 == t && (k.1[0], k.1[2]) == (page, head)).peekable();
        let want = rows.peek().is_some().then(|| {
            let values = rows.flat_map(|row| &row.2).map(|known| known.value.abs() as f32);
            (values.fold(0.0, f32::max) / dtype.max()).max(f32::MIN_POSITIVE)
        });
        assert_eq!(scales[t][page * HEADS + head], want.unwrap_or(0.0), "{dtype}, page {page}, head {head}");
    }
}

/// A page with scale 0 is empty: its old contents are neither read nor changed.
fn reused_pages_reset_their_scales<B: Backend>(backends: &[B]) {
    for (backend, layout) in backends.iter().flat_map(|b| LAYOUTS.map(|layout| (b, layout))) {
        let mut pool = Pool::new(Dtype::I8, layout);
        let mut scales = Elements::filled(Dtype::F32, PAGES * HEADS, 0.0);
        let values = [vec![2.0; HEADS * DIMS[0]], vec![2.0; HEADS * DIMS[1]]];
        let both = [ScaleMut::Dynamic(scales.view_mut(&[PAGES, HEADS])), ScaleMut::Static(Scale::One)];
        pool.append(backend, &[(0, 1, values)], both).expect("the scales fit");
        assert_eq!(pool.stored(0, (4, 1, 0)), vec![127.0; DIMS[0]]);
        assert_eq!(pool.stored(0, (4, 0, 0)), vec![-13.0; DIMS[0]], "garbage is not rounded");
        assert_eq!(pool.stored(1, (4, 1, 2)), vec![2.0; DIMS[1]]);
    }
}

/// Infinity saturates and NaN stays; neither affects the scale.
fn nan_and_infinite_values<B: Backend>(backends: &[B]) {
    for (backend, dtype) in backends.iter().flat_map(|b| DTYPES.map(|dtype| (b, dtype))) {
        let mut pool = Pool::new(dtype, KvLayout::Nhd);
        let mut scales = Elements::filled(Dtype::F32, PAGES * HEADS, 0.0);
        let mut k = vec![1.0; HEADS * DIMS[0]];
        (k[0], k[1], k[2]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        let both = [ScaleMut::Dynamic(scales.view_mut(&[PAGES, HEADS])), ScaleMut::Static(Scale::One)];
        pool.append(backend, &[(0, 0, [k, vec![f32::NAN; HEADS * DIMS[1]]])], both).expect("the scales fit");
        assert_eq!(scales.to_f32()[4 * HEADS], 1.0 / dtype.max());
        let stored = pool.stored(0, (4, 0, 0));
        let nan = |value: f32| if dtype == Dtype::I8 { value == 0.0 } else { value.is_nan() };
        assert!(nan(stored[0]) && pool.stored(1, (4, 0, 2)).into_iter().all(nan), "{dtype}: {stored:?}");
        let least = if dtype == Dtype::I8 { -128.0 } else { -dtype.max() };
        assert_eq!(stored[1..4], [dtype.max(), least, dtype.max()]);
    }
}

fn mla_caches_are_appended<B: Backend>(backends: &[B]) {
    let (ckv_dim, kpe_dim) = (24, 7);
    let at = [(1, 4), (-1, 0), (0, 6), (0, 0)];
    let new = Elements::new(Dtype::F16, &Generator::new(1).reals(4 * (ckv_dim + kpe_dim)));
    for (dtype, backend) in
        [Dtype::Bf16, Dtype::E4m3].iter().flat_map(|&d| backends.iter().map(move |b| (d, b)))
    {
        let mut caches =
            [ckv_dim, kpe_dim].map(|dim| Elements::filled(dtype, PAGES * PAGE_SIZE * dim, -13.0));
        let [ckv, kpe] = &mut caches;
        // one tensor holds both parts of a token
        let strides = [ckv_dim + kpe_dim, 1];
        let append = NewMlaTokens {
            ckv: new.strided(0, &[4, ckv_dim], &strides),
            kpe: new.strided(ckv_dim, &[4, kpe_dim], &strides),
            batch_indices: &at.map(|a| a.0),
            positions: &at.map(|a| a.1),
        };
        let target = MlaCacheMut {
            ckv: ckv.view_mut(&[PAGES, PAGE_SIZE, ckv_dim]),
            kpe: kpe.view_mut(&[PAGES, PAGE_SIZE, kpe_dim]),
        };
        let table = PageTable::new(TABLE.0, TABLE.1, TABLE.2, PAGE_SIZE);
        append_paged_mla_kv_cache(backend, &append, target, &table).expect("the tensors fit");
        for (cache, first, dim) in [(&caches[0], 0, ckv_dim), (&caches[1], ckv_dim, kpe_dim)] {
            let mut want = Elements::filled(dtype, PAGES * PAGE_SIZE * dim, -13.0);
            for (token, (r, position)) in at.into_iter().enumerate().filter(|(_, (r, _))| *r >= 0) {
                let (page, slot) = place(r, position);
                let row = &new.to_f32()[token * strides[0] + first..][..dim];
                want.write((page * PAGE_SIZE + slot) * dim, row);
            }
            assert_eq!(cache.to_f32(), want.to_f32());
        }
    }
}

/// Appends one token of zeros with these K scales and returns the error text.
fn refusal(dtype: Dtype, scale: ScaleMut<'_>) -> String {
    let mut pool = Pool::new(dtype, KvLayout::Nhd);
    let before = pool.memory.clone().map(|memory| memory.to_f32());
    let token = (0, 0, DIMS.map(|dim| vec![0.0; HEADS * dim]));
    let both = [ScaleMut::Static(Scale::One), scale];
    let error = pool.append(&crate::cpus(1)[0], &[token], both).expect_err("it is refused");
    assert_eq!(before, pool.memory.clone().map(|memory| memory.to_f32()), "nothing is written");
    error.to_string()
}

#[test]
fn scales_that_do_not_fit() {
    let refuses = |scale: Scale<'_>, text: &str| {
        let text = format!("kv.append_paged_kv_cache_quantized: {text}");
        assert_eq!(refusal(Dtype::E4m3, ScaleMut::Static(scale)), text);
    };
    for factor in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refuses(Scale::Tensor(factor), &format!("v scale = {factor}, expected a finite number above 0"));
    }
    refuses(Scale::Head(&[1.0]), "v scale has 1 elements, expected num_kv_heads = 3");
    refuses(Scale::Head(&[1.0, 2.0, -0.0]), "head 2: v scale = -0, expected a finite number above 0");
    let shapes = "expected [num_pages] = [6] or [num_pages, num_kv_heads] = [6, 3]";
    let ones = vec![1.0_f32; 18];
    let of = |shape: &[usize]| View::strided(&ones, shape, &[3, 1, 1][..shape.len()]).expect("it is there");
    refuses(Scale::Page(of(&[5])), &format!("v scale has shape [5], {shapes}"));
    refuses(Scale::Page(of(&[6, 2])), &format!("v scale has shape [6, 2], {shapes}"));
    let halves = vec![half::f16::ONE; 6];
    refuses(Scale::Page(View::new(&halves, &[6]).expect("it fits")), "v scale is f16, expected f32");
    // page 4 holds the token; scales of unused pages may be invalid
    let per_page = vec![0.0, f32::NAN, -1.0, 0.0, 0.0, 0.0];
    let text = "page 4: v scale = 0, expected a finite number above 0";
    refuses(Scale::Page(View::new(&per_page, &[6]).expect("it fits")), text);
    let mut per_head = ones.clone();
    per_head[4 * HEADS + 1] = f32::NAN;
    let text = "page 4, head 1: v scale = NaN, expected a finite number above 0";
    refuses(Scale::Page(View::new(&per_head, &[6, 3]).expect("it fits")), text);
}

#[test]
fn dynamic_scales_that_do_not_fit() {
    let refuses = |dtype: Dtype, scales: &mut [f32], shape: &[usize], text: &str| {
        let text = format!("kv.append_paged_kv_cache_quantized: {text}");
        let scales = ViewMut::new(scales, shape).expect("it fits");
        assert_eq!(refusal(dtype, ScaleMut::Dynamic(scales)), text);
    };
    let text = "v scale is dynamic, but the cache is bf16, expected e4m3, e5m2 or int8";
    refuses(Dtype::Bf16, &mut [0.0; 18], &[6, 3], text);
    let text = "v scale has shape [6], expected [num_pages, num_kv_heads] = [6, 3]";
    refuses(Dtype::I8, &mut [0.0; 6], &[6], text);
    let text = "v scale has shape [3, 6], expected [num_pages] = [6] or [num_pages, num_kv_heads] = [6, 3]";
    refuses(Dtype::I8, &mut [0.0; 18], &[3, 6], text);
    let mut scales = [0.0; 18];
    scales[4 * HEADS + 2] = -2.0;
    let text = "page 4, head 2: v scale = -2, expected a finite number, 0 if unused";
    refuses(Dtype::E5m2, &mut scales, &[6, 3], text);
}

#[test]
fn scales_of_a_cache_that_is_read() {
    let ones = [1.0_f32; 6];
    let page = Scale::Page(View::new(&ones[..], &[6]).expect("it fits"));
    let scales = tilewright::KvScales { k: Scale::Head(&ones[..2]), v: page };
    assert_eq!(scales.check("a.b", 2, Some(6)), Ok(()));
    let refused = |heads, pages| scales.check("a.b", heads, pages).expect_err("it is refused").to_string();
    assert_eq!(refused(2, None), "a.b: v scale is per page, but the cache is ragged");
    assert_eq!(refused(3, None), "a.b: k scale has 2 elements, expected num_kv_heads = 3");
    assert_eq!(page.check_pages("a.b", "v scale", 0..6), Ok(()));
    assert_eq!(tilewright::KvScales::default().check("a.b", 7, None), Ok(()));
}

crate::judge_backends!(
    given_scales_divide_and_round,
    dynamic_scales_stay_within_their_error_bound,
    reused_pages_reset_their_scales,
    nan_and_infinite_values,
    mla_caches_are_appended
);
