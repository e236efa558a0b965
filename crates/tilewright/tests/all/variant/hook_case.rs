//! Comparison of every hook of a variant with an f64 definition, on all execution paths.

use super::execution_paths::execution_paths;
use crate::generator::Generator;
use tilewright::{
    Problem,
    attention::variant::{QueryRow, Variant},
    reference::attention::{Definition, LogitIndex},
};

/// Half an ulp of 1.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// Positions: of rows, also negative; of keys, also far out of range.
const QO: [i32; 12] = [-3, -1, 0, 1, 2, 5, 7, 12, 31, 64, 1000, 131_071];
const KV: [u32; 20] =
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 30, 31, 32, 63, 64, 999, 131_072, (1 << 24) - 1];

/// A variant, the request of the definition, and the number of roundings allowed per hook.
pub(crate) struct HookCase<'a, V> {
    pub(crate) variant: V,
    pub(crate) problem: &'a Problem,
    pub(crate) request: u32,
    pub(crate) roundings: f64,
}

impl<V: Variant + Clone> HookCase<'_, V> {
    /// Asserts that every hook matches the definition.
    pub(crate) fn check(&self, definition: &Definition<'_>) {
        let heads = self.problem.heads();
        for (path, run) in execution_paths(&self.variant, self.problem) {
            for (h, p) in (0..heads.qo).flat_map(|h| QO.map(|p| (h, p))) {
                let g = h / heads.group();
                let row = QueryRow { request: self.request, qo: p, qo_head: h as u32, kv_head: g as u32 };
                let index = LogitIndex { i: 0, j: 0, h, g, p: i64::from(p) };
                let at = format!("{}, {path}, {row:?}", self.variant.name());
                self.row(definition, &*run, (row, index), &at);
            }
            for (g, kv) in (0..heads.kv).flat_map(|g| KV.map(|kv| (g, kv))) {
                let index = LogitIndex { i: 0, j: kv as usize, h: 0, g, p: 0 };
                let at = format!("{}, {path}, head {g}, key {kv}", self.variant.name());
                let key = |x: &mut [f32]| run.key(g as u32, kv, x);
                self.vector(&format!("{at}, key"), key, |x| (definition.key)(index, x));
                let value = |x: &mut [f32]| run.value(g as u32, kv, x);
                self.vector(&format!("{at}, value"), value, |x| (definition.value)(index, x));
            }
        }
    }

    fn row(
        &self,
        definition: &Definition<'_>,
        run: &dyn super::execution_paths::HookRunner,
        (row, index): (QueryRow, LogitIndex),
        at: &str,
    ) {
        let indices = KV.map(|kv| LogitIndex { j: kv as usize, ..index });
        let flags: Vec<bool> = indices.iter().map(|index| (definition.visible)(*index)).collect();
        assert_eq!(run.mask(row, &KV), flags, "{at}, mask of {KV:?}");

        let mut random = Generator::new(u64::from(row.qo_head) + 100);
        for size in [0.1, 3.0, 25.0] {
            let before: Vec<f32> = random.reals(KV.len()).iter().map(|x| x * size).collect();
            let mut logits = before.clone();
            run.logits(row, &KV, &mut logits);
            for ((logit, before), index) in logits.iter().zip(before).zip(indices) {
                let want = (definition.logit)(index, f64::from(before));
                let magnitude = want.abs() + f64::from(before.abs()).min(2.0 * want.abs() + 100.0);
                // a weight is an exponential, whose error is that of the logit: at most 68 plus a bias here
                let magnitude = if definition.softmax { magnitude } else { want * 80.0 };
                self.close(*logit, (want, magnitude), &format!("{at}, logits({before}) of {index:?}"));
            }
        }
        self.vector(&format!("{at}, query"), |x| run.query(row, x), |x| (definition.query)(index, x));
        self.vector(&format!("{at}, output"), |x| run.output(row, x), |x| (definition.output)(index, x));
        self.update(definition, run, row, at);
    }

    fn update(
        &self,
        definition: &Definition<'_>,
        run: &dyn super::execution_paths::HookRunner,
        row: QueryRow,
        at: &str,
    ) {
        let nothing = (f32::NEG_INFINITY, 0.0);
        for (max, sum) in [nothing, (0.0, 1.0), (-3.5, 2.25), (40.0, 7.0), (-60.0, 1.5)] {
            let (new_max, new_sum) = run.update(row, max, sum);
            let Some(sink) = &definition.sink else {
                assert_eq!((new_max, new_sum), (max, sum), "{at}, update changes nothing");
                continue;
            };
            let (max, sum, sink) = (f64::from(max), f64::from(sum), sink(row.qo_head as usize));
            // relative to the new maximum
            let new = f64::from(new_max);
            let want = sum * (max - new).exp() + (sink - new).exp();
            assert!(new >= max && new >= sink, "{at}, update of {max}: maximum {new}");
            self.close(
                new_sum,
                (want, want * (1.0 + (max - sink).abs().min(90.0))),
                &format!("{at}, update({max})"),
            );
        }
    }

    /// Compares both transformations of a random head.
    fn vector(&self, at: &str, hook: impl Fn(&mut [f32]), definition: impl Fn(&mut [f64])) {
        let before = Generator::new(7).reals(self.problem.head_dim().qk);
        let (mut got, mut want) =
            (before.clone(), before.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>());
        hook(&mut got);
        definition(&mut want);
        let norm = want.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            self.close(*got, (want, norm), &format!("{at}[{i}]"));
        }
    }

    fn close(&self, got: f32, (want, magnitude): (f64, f64), at: &str) {
        let error = (f64::from(got) - want).abs();
        let bound = self.roundings * UNIT * magnitude + f64::from(f32::MIN_POSITIVE);
        assert!(error <= bound, "{at}: {got} instead of {want}, off by {error:e} of {bound:e}");
    }
}
