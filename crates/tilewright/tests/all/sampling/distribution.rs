//! Chi-square tests of drawn tokens against the exact distribution, for every filter and combinations.
//!
//! Seeds are fixed, so the tests are deterministic; critical values are those of p = 1e-4.

use crate::{assert_drawn_from, draws, draws_wanted, random};
use half::bf16;
use tilewright::{
    Backend, View, ViewMut,
    reference::sampling::{Filters, filtered, softmax},
    sampling::{FilterOrder, SamplingParams, Scores, TopKTies, distribution, sample, sampling_from_probs},
};

crate::judge_backends!(
    without_filters_tokens_follow_the_softmax,
    top_k_draws_from_the_k_most_probable,
    top_k_draws_from_all_ties_alike,
    a_tie_rule_leaves_exactly_k_tokens,
    distribution_matches_the_draws,
    top_p_draws_from_the_nucleus,
    min_p_draws_from_tokens_near_the_maximum,
    both_orders_of_top_k_and_top_p_draw_from_their_own_sets,
    all_filters_together_draw_from_their_intersection,
    probabilities_need_not_sum_to_1,
    seeds_are_independent_streams
);

fn check<B: Backend>(backend: &B, logits: &[f32], params: SamplingParams) {
    let wide: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    let expected = filtered(&softmax(&wide, f64::from(params.temperature)), &filters(params));
    assert_drawn_from(&expected, &draws(backend, logits, params), &format!("{params:?}"));
}

fn filters(params: SamplingParams) -> Filters {
    Filters {
        top_k: params.top_k.map(|k| k as usize),
        ties: params.top_k_ties,
        top_p: (params.top_p < 1.0).then_some(f64::from(params.top_p)),
        min_p: (params.min_p > 0.0).then_some(f64::from(params.min_p)),
        joint: params.order == FilterOrder::Joint,
    }
}

fn logits() -> Vec<f32> {
    random(40, 11)
}

fn params(seed: u64) -> SamplingParams {
    SamplingParams { seed, ..SamplingParams::default() }
}

fn without_filters_tokens_follow_the_softmax<B: Backend>([backend]: &[B; 1]) {
    for (seed, temperature) in [(1, 1.0), (2, 0.5), (3, 2.0), (4, 100.0)] {
        check(backend, &logits(), SamplingParams { temperature, ..params(seed) });
    }
    check(backend, &[0.5], params(5));
}

fn top_k_draws_from_the_k_most_probable<B: Backend>([backend]: &[B; 1]) {
    for (seed, k) in [(1, 1), (2, 2), (3, 10), (4, 39), (5, 40), (6, 1000)] {
        check(backend, &logits(), SamplingParams { top_k: Some(k), ..params(seed) });
    }
}

fn top_k_draws_from_all_ties_alike<B: Backend>([backend]: &[B; 1]) {
    let logits = [1.0, 2.0, 2.0, 0.0, 2.0, 3.0];
    check(backend, &logits, SamplingParams { top_k: Some(2), ..params(1) });
    check(backend, &[0.0; 20], SamplingParams { top_k: Some(1), ..params(2) });
}

fn a_tie_rule_leaves_exactly_k_tokens<B: Backend>([backend]: &[B; 1]) {
    let logits = [1.0, 2.0, 2.0, 0.0, 2.0, 3.0, 1.0, 2.0];
    for (seed, ties) in [(1, TopKTies::LowestIndex), (2, TopKTies::HighestIndex)] {
        for k in [2, 4, 7, 8] {
            let exact = SamplingParams { top_k: Some(k), top_k_ties: ties, ..params(seed) };
            check(backend, &logits, exact);
            for order in [FilterOrder::TopKFirst, FilterOrder::Joint] {
                // half of the total mass requires the ties; half of the mass after the tie rule does not
                check(backend, &logits, SamplingParams { top_p: 0.5, order, ..exact });
                check(backend, &logits, SamplingParams { min_p: 0.3, order, ..exact });
            }
            let kept: std::collections::HashSet<_> = draws(backend, &logits, exact).into_iter().collect();
            // a subset of the draws may miss some tokens
            let (max_tokens, all) = ((k as usize).min(8), crate::judge::stride() == 1);
            assert!(kept.len() == max_tokens || !all && kept.len() < max_tokens, "{ties:?} {k}: {kept:?}");
        }
    }
    let excluded = [0.0, f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, f32::NEG_INFINITY];
    check(
        backend,
        &excluded,
        SamplingParams { top_k: Some(3), top_k_ties: TopKTies::LowestIndex, ..params(3) },
    );
}

/// `distribution` writes the distribution of the draws.
fn distribution_matches_the_draws<B: Backend>([backend]: &[B; 1]) {
    let logits = logits();
    let wide: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for params in [
        SamplingParams { temperature: 0.0, ..params(1) },
        SamplingParams { temperature: 0.7, top_p: 0.9, ..params(1) },
        SamplingParams { top_k: Some(9), top_p: 0.8, order: FilterOrder::Joint, ..params(1) },
        SamplingParams { top_k: Some(9), min_p: 0.2, temperature: 2.0, ..params(1) },
    ] {
        let expected = filtered(&softmax(&wide, f64::from(params.temperature)), &filters(params));
        let mut probs = vec![0.0f32; 80];
        let view = View::strided(&logits, &[2, 40], &[0, 1]).unwrap();
        let out = ViewMut::new(&mut probs, &[2, 40]).unwrap();
        distribution(backend, Scores::Logits(view), &[params; 2], out).unwrap();
        for (i, &p) in probs.iter().enumerate() {
            let exact = expected[i % 40];
            assert!(
                (f64::from(p) - exact).abs() <= 2e-6 * exact,
                "{params:?}: {i} has {p}, expected {exact}"
            );
        }
    }
}

fn top_p_draws_from_the_nucleus<B: Backend>([backend]: &[B; 1]) {
    for (seed, top_p) in [(1, 1e-6), (2, 0.3), (3, 0.5), (4, 0.9), (5, 0.999)] {
        check(backend, &logits(), SamplingParams { top_p, ..params(seed) });
        check(backend, &logits(), SamplingParams { top_p, temperature: 0.6, ..params(seed + 10) });
    }
}

fn min_p_draws_from_tokens_near_the_maximum<B: Backend>([backend]: &[B; 1]) {
    for (seed, min_p) in [(1, 0.01), (2, 0.1), (3, 0.5), (4, 1.0)] {
        check(backend, &logits(), SamplingParams { min_p, ..params(seed) });
    }
}

fn both_orders_of_top_k_and_top_p_draw_from_their_own_sets<B: Backend>([backend]: &[B; 1]) {
    let combination =
        |seed, order| SamplingParams { top_k: Some(8), top_p: 0.8, temperature: 3.0, order, ..params(seed) };
    let first = combination(1, FilterOrder::TopKFirst);
    let joint = combination(2, FilterOrder::Joint);
    check(backend, &logits(), first);
    check(backend, &logits(), joint);
    check(backend, &logits(), SamplingParams { top_p: 0.3, ..joint });
    let support = |params| {
        draws(backend, &logits(), params).into_iter().collect::<std::collections::HashSet<_>>().len()
    };
    assert!(support(first) < support(joint), "the two orders differ on this row");
}

fn all_filters_together_draw_from_their_intersection<B: Backend>([backend]: &[B; 1]) {
    for order in [FilterOrder::TopKFirst, FilterOrder::Joint] {
        check(
            backend,
            &logits(),
            SamplingParams { top_k: Some(20), top_p: 0.95, min_p: 0.05, order, ..params(1) },
        );
        check(
            backend,
            &logits(),
            SamplingParams { top_k: Some(12), top_p: 0.99, min_p: 0.3, order, ..params(2) },
        );
    }
}

fn probabilities_need_not_sum_to_1<B: Backend>([backend]: &[B; 1]) {
    let probs: Vec<bf16> = random(40, 12).into_iter().map(|x| bf16::from_f32(5.0 * x.exp())).collect();
    let view = View::strided(&probs, &[draws_wanted(), 40], &[0, 1]).unwrap();
    let wide: Vec<f64> = probs.iter().map(|p| f64::from(p.to_f32())).collect();
    for (filters, params) in [
        (Filters::default(), params(1)),
        (Filters { top_p: Some(0.5), ..Filters::default() }, SamplingParams { top_p: 0.5, ..params(2) }),
        (Filters { min_p: Some(0.25), ..Filters::default() }, SamplingParams { min_p: 0.25, ..params(3) }),
    ] {
        let params: Vec<_> =
            (0..draws_wanted() as u64).map(|offset| SamplingParams { offset, ..params }).collect();
        let mut out = vec![Ok(0); draws_wanted()];
        sampling_from_probs(backend, view, &params, &mut out).unwrap();
        let tokens: Vec<u32> = out.into_iter().map(Result::unwrap).collect();
        assert_drawn_from(&filtered(&wide, &filters), &tokens, &format!("{filters:?}"));
    }
}

/// Consecutive seeds give independent streams.
fn seeds_are_independent_streams<B: Backend>([backend]: &[B; 1]) {
    let logits = logits();
    let view = View::strided(&logits, &[draws_wanted(), 40], &[0, 1]).unwrap();
    let params: Vec<_> = (0..draws_wanted() as u64).map(params).collect();
    let mut out = vec![Ok(0); draws_wanted()];
    sample(backend, view, &params, &mut out).unwrap();
    let tokens: Vec<u32> = out.into_iter().map(Result::unwrap).collect();
    let wide: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    assert_drawn_from(&softmax(&wide, 1.0), &tokens, "one draw of each seed");
}
