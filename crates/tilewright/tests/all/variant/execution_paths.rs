//! Execution paths of a variant: f32 and every instruction set, as hooks, as recorded expressions, and as expressions read
//! from JSON.

use tilewright::{
    Problem,
    attention::{
        Heads,
        variant::{At, ExpressionVariant, Pair, QueryRow, Variant},
    },
    cpu::{Isa, Trial},
};

/// One execution path.
pub(crate) trait HookRunner {
    fn query(&self, row: QueryRow, q: &mut [f32]);
    fn key(&self, kv_head: u32, kv: u32, key: &mut [f32]);
    fn value(&self, kv_head: u32, kv: u32, value: &mut [f32]);
    fn logits(&self, row: QueryRow, kv: &[u32], logits: &mut [f32]);
    fn mask(&self, row: QueryRow, kv: &[u32]) -> Vec<bool>;
    fn update(&self, row: QueryRow, max: f32, sum: f32) -> (f32, f32);
    fn output(&self, row: QueryRow, o: &mut [f32]);
}

/// All execution paths with their descriptions.
pub(crate) fn execution_paths<V: Variant + Clone>(
    variant: &V,
    problem: &Problem,
) -> Vec<(String, Box<dyn HookRunner>)> {
    let recorded = ExpressionVariant::of(variant).expect("it can be recorded");
    let read = ExpressionVariant::from_json(&recorded.to_json()).expect("it can be read back");
    let mut paths: Vec<(String, Box<dyn HookRunner>)> = Vec::new();
    add(&mut paths, "hooks", variant, problem);
    add(&mut paths, "expressions", &recorded, problem);
    add(&mut paths, "expressions from JSON", &read, problem);
    paths
}

fn add<V: Variant + Clone>(
    paths: &mut Vec<(String, Box<dyn HookRunner>)>,
    form: &str,
    variant: &V,
    problem: &Problem,
) {
    let scalars = Scalars { variant: variant.clone(), heads: problem.heads() };
    paths.push((format!("{form} on f32"), Box::new(scalars)));
    for isa in Isa::available() {
        let trial = Trial::new(variant.clone(), problem).expect("it passes the checks").on(isa);
        paths.push((format!("{form} on {isa}"), Box::new(trial)));
    }
}

impl HookRunner for Trial {
    fn query(&self, row: QueryRow, q: &mut [f32]) {
        self.query(row, q);
    }
    fn key(&self, kv_head: u32, kv: u32, key: &mut [f32]) {
        self.key(kv_head, kv, key);
    }
    fn value(&self, kv_head: u32, kv: u32, value: &mut [f32]) {
        self.value(kv_head, kv, value);
    }
    fn logits(&self, row: QueryRow, kv: &[u32], logits: &mut [f32]) {
        self.logits(row, kv, logits);
    }
    fn mask(&self, row: QueryRow, kv: &[u32]) -> Vec<bool> {
        self.mask(row, kv)
    }
    fn update(&self, row: QueryRow, max: f32, sum: f32) -> (f32, f32) {
        self.update(row, max, sum)
    }
    fn output(&self, row: QueryRow, o: &mut [f32]) {
        self.output(row, o);
    }
}

/// Runs the hooks on f32, one number at a time.
struct Scalars<V> {
    variant: V,
    heads: Heads,
}

impl<V: Variant> Scalars<V> {
    fn pairs(&self, x: &mut [f32], hook: impl Fn(&V, usize, Pair<f32>) -> Pair<f32>) {
        let half = x.len() / 2;
        for i in 0..half {
            let pair = hook(&self.variant, i, Pair { first: x[i], second: x[half + i] });
            (x[i], x[half + i]) = (pair.first, pair.second);
        }
    }
}

impl<V: Variant> HookRunner for Scalars<V> {
    fn query(&self, row: QueryRow, q: &mut [f32]) {
        self.pairs(q, |variant, dim, pair| variant.query(&At::scalars(row, 0, dim, self.heads), pair));
    }
    fn key(&self, kv_head: u32, kv: u32, key: &mut [f32]) {
        let row = QueryRow { kv_head, ..QueryRow::default() };
        self.pairs(key, |variant, dim, pair| variant.key(&At::scalars(row, kv, dim, self.heads), pair));
    }
    fn value(&self, kv_head: u32, kv: u32, value: &mut [f32]) {
        let row = QueryRow { kv_head, ..QueryRow::default() };
        for (dim, x) in value.iter_mut().enumerate() {
            *x = self.variant.value(&At::scalars(row, kv, dim, self.heads), *x);
        }
    }
    fn logits(&self, row: QueryRow, kv: &[u32], logits: &mut [f32]) {
        for (kv, logit) in kv.iter().zip(logits) {
            *logit = self.variant.logits(&At::scalars(row, *kv, 0, self.heads), *logit);
        }
    }
    fn mask(&self, row: QueryRow, kv: &[u32]) -> Vec<bool> {
        kv.iter().map(|kv| self.variant.mask(&At::scalars(row, *kv, 0, self.heads))).collect()
    }
    fn update(&self, row: QueryRow, max: f32, sum: f32) -> (f32, f32) {
        self.variant.update(&At::scalars(row, 0, 0, self.heads), max, sum)
    }
    fn output(&self, row: QueryRow, o: &mut [f32]) {
        for (dim, x) in o.iter_mut().enumerate() {
            *x = self.variant.output(&At::scalars(row, 0, dim, self.heads), *x);
        }
    }
}
