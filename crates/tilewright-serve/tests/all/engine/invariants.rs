//! Invariance: a request's tokens do not depend on the options of the engine; `soak` shows that nor do they on batch peers.
//!
//! Tokens are sampled with a seed; the unit tests of the engine compare logits bit for bit.

use super::session::{Case, SHIPPED, Setup, case, draws};
use crate::fixtures::FIXTURES;
use tilewright::Dtype;
use tilewright_serve::EngineOptions;

/// Prompt lengths around a page boundary, and a long prompt.
fn cases() -> Vec<Case> {
    let lengths = [1, 15, 16, 17, 37, 150];
    (1..).zip(lengths).map(|(seed, len)| case(seed, len, 44)).collect()
}

#[track_caller]
fn assert_same(setups: &[Setup], baseline: Setup, cases: &[Case]) {
    let expected = baseline.run_separately(cases);
    assert!(expected.iter().all(|outcome| outcome.tokens.len() >= 40), "outputs are long enough to differ");
    for setup in setups {
        assert_eq!(setup.run_batched(cases), expected, "{setup:?}");
    }
}

#[test]
fn output_is_the_same_for_all_chunks_pages_and_threads() {
    for model in FIXTURES {
        let baseline = Setup::new(model);
        let chunks = |tokens| baseline.with(|options| options.max_step_tokens = tokens);
        let pages = |(page_size, prefix_reuse)| {
            baseline.with(|options| {
                (options.page_size, options.num_pages) = (page_size, 2048 / page_size);
                options.prefix_reuse = prefix_reuse;
            })
        };
        let sizes = [(1, false), (1, true), (5, false), (5, true), (16, true), (64, false), (64, true)];
        let threads = |threads| Setup { threads, ..chunks(64) };
        let setups = [&[1, 7, 16, 64, 512].map(chunks)[..], &sizes.map(pages), &[1, 2, 4].map(threads)];
        assert_same(&setups.concat(), baseline, &cases());
    }
}

#[test]
fn a_preempted_request_is_computed_again_from_its_first_token() {
    let setup = Setup::new("llama").with(|options| (options.page_size, options.num_pages) = (4, 20));
    let mut session = setup.start();
    session.run(&[case(1, 20, 44), case(2, 20, 44)]);
    let report = session.report();
    assert_eq!(report.preemptions, 1);
    // At least the second prompt is computed twice, and each other token except the last once.
    assert!(report.prefill_tokens >= 60, "{report:?}");
    assert_eq!(report.reused_tokens, 0);
}

#[test]
fn a_preempted_request_precedes_waiting_ones() {
    let small = |options: &mut EngineOptions| {
        (options.page_size, options.num_pages, options.max_requests) = (4, 20, 2);
    };
    let mut session = Setup::new("llama").with(small).start();
    let [first, _, third] =
        [case(1, 20, 44), case(2, 20, 44), case(3, 1, 3)].map(|case| session.submit(&case));
    while session.generated(first).len() < 44 {
        session.step();
        assert_eq!(session.generated(third), [0; 0], "it overtook the second, which needs more pages");
    }
    assert_eq!(session.report().preemptions, 1);
    session.finish();
}

#[test]
fn output_is_batch_invariant_for_every_dtype_of_weights_and_pages() {
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    for model in FIXTURES {
        for (dtype, kv_dtype) in dtypes.iter().flat_map(|&dtype| dtypes.map(|kv_dtype| (dtype, kv_dtype))) {
            let baseline = Setup { dtype: Some(dtype), ..Setup::new(model) };
            let baseline = baseline.with(|options| options.kv_dtype = Some(kv_dtype));
            let small = baseline.with(|options| {
                (options.page_size, options.num_pages, options.max_step_tokens) = (4, 50, 21);
                options.prefix_reuse = true;
            });
            assert_same(&[small], baseline, &cases()[2..]);
        }
    }
}

#[test]
fn output_of_the_shipped_model_is_batch_invariant() {
    let baseline = Setup::new(SHIPPED);
    let cases: Vec<_> = (1..).zip([9, 100, 33]).map(|(seed, len)| case(seed, len, 44)).collect();
    let small = |max_step_tokens| {
        baseline.with(|options| {
            (options.page_size, options.num_pages) = (8, 20);
            (options.max_step_tokens, options.prefix_reuse) = (max_step_tokens, true);
        })
    };
    assert_same(&[baseline, small(512), small(17)], baseline, &cases);
}

#[test]
fn temperature_0_is_the_same_for_every_seed() {
    for model in FIXTURES {
        let greedy = |seed| {
            let mut case = case(1, 37, 44);
            (case.options.sampling.temperature, case.options.sampling.seed) = (0.0, seed);
            case
        };
        let outcomes = Setup::new(model).run_batched(&[1, 2, 3].map(greedy));
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{model}");
        let drawn = Setup::new(model)
            .run_batched(&[1, 5].map(|seed| Case { options: draws(seed, 44), ..case(1, 37, 44) }));
        assert_ne!(drawn[0], drawn[1], "{model}: with a temperature the seed decides");
    }
}
