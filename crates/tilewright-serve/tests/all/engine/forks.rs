//! Several continuations of a prompt: the prompt is computed once, and each output equals that of a separate request.

use super::session::{Case, Outcome, SHIPPED, Session, Setup, case, draws, prompt};
use crate::fixtures::FIXTURES;

/// Compares `count` continuations of one prompt with separate requests in separate engines.
fn compare(setup: Setup, len: usize, count: u64) -> Session {
    let cases: Vec<_> =
        (0..count).map(|seed| Case { prompt: prompt(7, len), options: draws(seed, 44) }).collect();
    let expected = Setup::new(setup.model).run_separately(&cases);
    let mut session = setup.start();
    let outcomes = continue_all(&mut session, &cases);
    assert_eq!(outcomes, expected, "{setup:?}");
    session
}

fn continue_all(session: &mut Session, cases: &[Case]) -> Vec<Outcome> {
    let options: Vec<_> = cases.iter().map(|case| case.options.clone()).collect();
    let ids = session.submit_all(&cases[0].prompt, &options);
    session.finish();
    ids.into_iter().map(|id| session.take_outcome(id)).collect()
}

#[test]
fn continuations_equal_separate_requests() {
    for model in FIXTURES {
        for prefix_reuse in [false, true] {
            // a partial last page, a full last page, and a single partial page
            for len in [37, 48, 5] {
                let setup = Setup::new(model).with(|options| options.prefix_reuse = prefix_reuse);
                let report = compare(setup, len, 6).report();
                assert_eq!((report.prefill_tokens, report.reused_tokens), (len, 5 * len), "{setup:?}");
                assert_eq!(report.decode_tokens, 6 * 43, "{setup:?}");
            }
        }
    }
}

#[test]
fn continuations_of_a_chunked_prompt_equal_separate_requests() {
    for model in FIXTURES {
        for max_step_tokens in [1, 10, 37] {
            let setup = Setup::new(model).with(|options| options.max_step_tokens = max_step_tokens);
            let report = compare(setup, 37, 4).report();
            assert_eq!((report.prefill_tokens, report.reused_tokens), (37, 3 * 37), "{setup:?}");
        }
    }
}

#[test]
fn a_prompt_of_1000_tokens_with_8_continuations_is_computed_once() {
    let setup = Setup::new(SHIPPED).with(|options| options.prefix_reuse = true);
    let mut session = setup.start();
    let options: Vec<_> = (0..8).map(|seed| draws(seed, 8)).collect();
    let ids = session.submit_all(&prompt(7, 1000), &options);
    session.finish();
    let report = session.report();
    assert_eq!((report.prefill_tokens, report.reused_tokens), (1000, 7000));
    // 62 full pages are shared; the 63rd, half full, is copied
    assert_eq!((report.reused_pages, report.peak_pages), (7 * 62, 62 + 8));
    assert_eq!(report.decode_tokens, 8 * 7);
    let expected =
        setup.run_separately(&[3, 7].map(|seed| Case { prompt: prompt(7, 1000), options: draws(seed, 8) }));
    assert_eq!([session.take_outcome(ids[3]), session.take_outcome(ids[7])], expected[..]);
}

#[test]
fn continuations_above_max_requests_equal_separate_requests() {
    for model in FIXTURES {
        for (max_requests, prefix_reuse) in [(1, false), (1, true), (3, false), (3, true)] {
            let setup = Setup::new(model).with(|options| {
                (options.max_requests, options.prefix_reuse) = (max_requests, prefix_reuse);
            });
            let report = compare(setup, 37, 6).report();
            // waiting continuations reuse the prompt from the tree, or compute it again
            let computed = if prefix_reuse { 37 + (6 - max_requests) * 5 } else { 37 * (7 - max_requests) };
            assert_eq!(report.prefill_tokens, computed, "{setup:?}");
        }
    }
}

#[test]
fn continuations_without_pages_equal_separate_requests() {
    for model in FIXTURES {
        for (prefix_reuse, max_step_tokens) in [(false, 512), (true, 512), (true, 10), (false, 10)] {
            let setup = Setup::new(model).with(|options| {
                (options.page_size, options.num_pages) = (8, 16);
                (options.prefix_reuse, options.max_step_tokens) = (prefix_reuse, max_step_tokens);
            });
            let report = compare(setup, 37, 6).report();
            assert!(report.preemptions > 0, "{setup:?}: no preemption");
        }
    }
}

#[test]
fn continuations_of_a_preempted_prompt_equal_separate_requests() {
    for model in FIXTURES {
        let setup = Setup::new(model).with(|options| {
            (options.page_size, options.num_pages, options.max_step_tokens) = (4, 24, 8);
        });
        let others = [case(1, 2, 44), case(2, 2, 44)];
        let cases: Vec<_> =
            (3..7).map(|seed| Case { prompt: prompt(7, 50), options: draws(seed, 44) }).collect();
        let mut session = setup.start();
        let first = others.each_ref().map(|case| session.submit(case));
        (0..14).for_each(|_| session.step());
        let outcomes = continue_all(&mut session, &cases);
        assert_eq!(outcomes, Setup::new(model).run_separately(&cases), "{model}");
        assert_eq!(
            first.map(|id| session.take_outcome(id))[..],
            Setup::new(model).run_separately(&others),
            "{model}"
        );
        assert!(session.report().preemptions > 0, "{model}: no preemption");
    }
}

#[test]
fn continuations_of_different_lengths_equal_separate_requests() {
    for model in FIXTURES {
        let mut session = Setup::new(model).start();
        let cases =
            [1, 3, 0, 7].map(|more| Case { prompt: prompt(7, 37), options: draws(more as u64, 1 + more) });
        let outcomes = continue_all(&mut session, &cases);
        assert_eq!(outcomes, Setup::new(model).run_separately(&cases), "{model}");
    }
}
