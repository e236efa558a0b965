//! Custom variants that use every hook.

use super::{examples::distance_kernel::DistanceKernel, hook_case::HookCase, problem};
use tilewright::{
    attention::variant::{At, Number, Pair, Variant},
    reference::attention::Definition,
};

#[test]
fn a_distance_kernel_is_its_formula() {
    let variant = DistanceKernel { ranges: vec![8.0, 100.0, 1e5, 3e6] };
    let ranges: Vec<f64> = variant.ranges.iter().map(|x| f64::from(*x)).collect();
    let kernel = |distance: f64, h: usize| (-distance.abs() / ranges[h]).exp();
    let definition = Definition {
        logit: Box::new(|at, s| s * kernel(at.j as f64 - at.p as f64, at.h)),
        ..Definition::default()
    };
    HookCase { variant, problem: &problem(4, 2), request: 0, roundings: 90.0 }.check(&definition);
}

/// Implements every hook with every index that it may read.
#[derive(Debug, Clone)]
struct AllHooks;

impl Variant for AllHooks {
    fn name(&self) -> &str {
        "everything"
    }

    #[inline(always)]
    fn query<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let shift = at.request() + at.qo_head() + at.kv_head() + at.dim() * at.number(0.5);
        Pair { first: pair.first + shift, second: pair.second - shift }
    }

    #[inline(always)]
    fn key<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let shift = at.kv_head() * at.num_kv_heads() + at.dim();
        Pair { first: pair.second + shift, second: pair.first * at.kv().min(at.number(9.0)) }
    }

    #[inline(always)]
    fn value<N: Number>(&self, at: &At<N>, x: N) -> N {
        x * (at.dim() + at.number(1.0)) + at.kv_head() - at.kv().min(at.number(9.0))
    }

    #[inline(always)]
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        let odd = at.kv() - (at.kv() * at.number(0.5)).floor() * at.number(2.0);
        odd.eq(at.qo_head() - at.kv_head() * at.number(2.0)) & !at.kv().gt(at.qo() + at.request())
    }

    #[inline(always)]
    fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
        // nonlinear, so it is only correct if applied once, after the merge
        o * o + at.dim() * at.num_qo_heads() + at.request() + at.qo_head() + at.kv_head()
    }
}

#[test]
fn every_hook_reads_every_index_that_it_has() {
    let (request, kv_heads) = (3, 2.0);
    let half = 19;
    let definition = Definition {
        query: Box::new(move |at, q| {
            for i in 0..half {
                let shift = f64::from(request) + (at.h + at.g) as f64 + i as f64 / 2.0;
                q[i] += shift;
                q[half + i] -= shift;
            }
        }),
        key: Box::new(move |at, k| {
            for i in 0..half {
                let (first, second) = (k[i], k[half + i]);
                k[i] = second + at.g as f64 * kv_heads + i as f64;
                k[half + i] = first * at.j.min(9) as f64;
            }
        }),
        value: Box::new(|at, v| {
            for (i, x) in v.iter_mut().enumerate() {
                *x = *x * (i as f64 + 1.0) + at.g as f64 - at.j.min(9) as f64;
            }
        }),
        visible: Box::new(move |at| at.j % 2 == at.h - 2 * at.g && at.j as i64 <= at.p + i64::from(request)),
        output: Box::new(move |at, o| {
            for (i, x) in o.iter_mut().enumerate() {
                *x = *x * *x + (i * 4) as f64 + f64::from(request) + (at.h + at.g) as f64;
            }
        }),
        ..Definition::default()
    };
    let case = HookCase { variant: AllHooks, problem: &problem(4, 2 * half), request: 3, roundings: 4.0 };
    case.check(&definition);
}
