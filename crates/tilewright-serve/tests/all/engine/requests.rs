//! Finish reasons, counters of the report, and error texts of the engine.

use super::session::{Case, SHIPPED, Setup, VOCAB, case, draws, folder, prompt};
use crate::fixtures::{FIXTURES, transformer};
use tilewright::{Cpu, Dtype, sampling::SamplingParams};
use tilewright_serve::{Engine, EngineOptions, Event, FinishCounts, FinishReason, GenerateOptions};

#[test]
fn max_tokens_ends_a_request() {
    for max_tokens in [1, 2, 44] {
        let outcome = Setup::new("llama").run_separately(&[case(1, 37, max_tokens)]).remove(0);
        assert_eq!((outcome.tokens.len(), outcome.reason), (max_tokens, Some(FinishReason::Length)));
    }
}

#[test]
fn a_stop_token_is_the_last_token_of_a_request_and_of_no_other() {
    for model in FIXTURES {
        let setup = Setup::new(model);
        let free = setup.run_separately(&[case(1, 37, 44)]).remove(0).tokens;
        // the first occurrence of a late token
        let stop = free[20];
        let end = free.iter().position(|&token| token == stop).expect("it is there");
        let mut stopped = case(1, 37, 44);
        stopped.options.stop = vec![stop, VOCAB as u32 - 1];
        let outcomes = setup.run_batched(&[stopped, case(1, 37, 44)]);
        assert_eq!(outcomes[0].tokens, free[..=end], "{model}");
        assert_eq!(outcomes[0].reason, Some(FinishReason::Stop), "{model}");
        assert_eq!(outcomes[1].tokens, free, "{model}");
    }
}

#[test]
fn a_stop_token_in_the_prompt_stops_nothing() {
    let mut request = case(1, 37, 44);
    let outcomes = Setup::new("llama").run_separately(std::slice::from_ref(&request));
    let unused = (0..VOCAB as u32)
        .find(|token| !outcomes[0].tokens.contains(token))
        .expect("few tokens were generated");
    request.prompt[36] = unused;
    let expected = Setup::new("llama").run_separately(std::slice::from_ref(&request));
    if !expected[0].tokens.contains(&unused) {
        request.options.stop = vec![unused];
        assert_eq!(Setup::new("llama").run_separately(&[request]), expected);
    }
}

#[test]
fn the_context_ends_a_request_before_max_tokens() {
    for (model, context) in [("llama", 512), ("qwen2", 512), (SHIPPED, 2048)] {
        let outcome = Setup::new(model).run_separately(&[case(1, context - 10, 44)]).remove(0);
        assert_eq!((outcome.tokens.len(), outcome.reason), (10, Some(FinishReason::Context)), "{model}");
    }
    // a small pool limits the context
    let setup = Setup::new("llama").with(|options| (options.num_pages, options.page_size) = (10, 5));
    assert_eq!(setup.start().engine.context(), 50);
    let outcomes = setup.run_batched(&[case(1, 40, 44), case(2, 49, 44)]);
    assert_eq!(outcomes[0].reason, Some(FinishReason::Pages));
    assert_eq!(outcomes.iter().map(|outcome| outcome.tokens.len()).collect::<Vec<_>>(), [10, 1]);
    let whole = Setup::new("llama").run_separately(&[case(1, 40, 10), case(2, 49, 1)]);
    assert_eq!([&outcomes[0].tokens, &outcomes[1].tokens], [&whole[0].tokens, &whole[1].tokens]);
}

#[test]
fn a_pool_of_exactly_the_context_does_not_limit_it() {
    let reason = |num_pages| {
        let setup =
            Setup::new("llama").with(|options| (options.num_pages, options.page_size) = (num_pages, 16));
        setup.run_batched(&[case(1, num_pages * 16 - 2, 44)]).remove(0).reason
    };
    assert_eq!([reason(31), reason(32)], [Some(FinishReason::Pages), Some(FinishReason::Context)]);
}

#[test]
fn a_report_counts_finished_requests_by_reason() {
    let setup = Setup::new("llama").with(|options| (options.num_pages, options.page_size) = (10, 5));
    let mut session = setup.start();
    let free = setup.run_separately(&[case(1, 37, 10)]).remove(0).tokens;
    let mut stopped = case(1, 37, 10);
    stopped.options.stop = vec![free[4]];
    session.run(&[stopped, case(2, 40, 44), case(3, 5, 2), case(4, 5, 2)]);
    let expected = FinishCounts { stop: 1, length: 2, pages: 1, ..FinishCounts::default() };
    assert_eq!(session.report().finished, expected);
}

#[test]
fn a_prompt_longer_than_the_pool_names_the_pages() {
    let setup = Setup::new("llama").with(|options| (options.num_pages, options.page_size) = (10, 5));
    let mut engine = setup.start().engine;
    let error = engine.submit(&prompt(1, 50), &[draws(1, 5)]).expect_err("refused").to_string();
    let text = "engine.submit: the prompt has 50 tokens, 10 pages of 5 tokens hold 50: expected at most 49, to \
                leave room for one";
    assert_eq!(error, text);
}

#[test]
fn a_report_counts_every_token_once() {
    let setup = Setup::new("llama").with(|options| options.max_step_tokens = 16);
    let mut session = setup.start();
    assert!(session.engine.is_idle());
    assert_eq!(session.engine.step().expect("an idle step"), []);
    session.run(&[case(1, 37, 10), case(2, 5, 3)]);
    let report = session.report();
    // the last token of each request is sampled, not computed
    assert_eq!((report.prefill_tokens, report.decode_tokens), (37 + 5, 9 + 2));
    assert_eq!((report.preemptions, report.reused_tokens, report.num_pages), (0, 0, 512));
    assert_eq!(report.peak_pages, 3 + 1);
    assert!(report.steps >= 12 && report.attention_time < report.prefill_time + report.decode_time);
    assert!(report.prefill_work.flops > report.decode_work.flops && report.decode_work.bytes > 0.0);
}

#[test]
fn a_step_respects_the_limits_of_tokens_and_requests() {
    let setup = Setup::new("llama");
    let setup = setup.with(|options| (options.max_step_tokens, options.max_requests) = (11, 3));
    let mut session = setup.start();
    for seed in 1..8 {
        session.submit(&case(seed, 20, 5));
    }
    let mut computed = 0;
    while !session.engine.is_idle() {
        let events = session.engine.step().expect("a step");
        session.engine.check_integrity().expect("pages with one owner each");
        let report = session.report();
        let now = report.prefill_tokens + report.decode_tokens;
        assert!(now > computed && now - computed <= 11);
        computed = now;
        let drawn = events.iter().filter(|event| matches!(event, Event::Token { .. })).count();
        assert!(drawn <= 3);
    }
    assert_eq!(computed, 7 * (20 + 4));
}

fn engine(change: impl Fn(&mut EngineOptions)) -> Result<Engine<Cpu>, tilewright::Error> {
    let mut options = Setup::new("llama").options;
    change(&mut options);
    Engine::new(transformer(&folder("llama"), None), Cpu::with_threads(1).unwrap(), options)
}

#[test]
fn an_engine_rejects_options_of_zero() {
    let refused = |change: fn(&mut EngineOptions)| engine(change).expect_err("refused").to_string();
    let zero = refused(|options| options.max_step_tokens = 0);
    assert_eq!(zero, "engine.new: max_step_tokens = 0, expected at least 1");
    let zero = refused(|options| options.max_requests = 0);
    assert_eq!(zero, "engine.new: max_requests = 0, expected at least 1");
    let zero = refused(|options| options.page_size = 0);
    assert_eq!(zero, "engine.new: page_size = 0, expected at least 1");
    let zero = refused(|options| options.num_pages = 0);
    assert_eq!(zero, "engine.new: num_pages = 0, expected at least 1");
}

#[test]
fn an_engine_rejects_a_pool_larger_than_memory() {
    let refused = |num_pages, page_size| {
        let change =
            |options: &mut EngineOptions| (options.num_pages, options.page_size) = (num_pages, page_size);
        engine(change).expect_err("refused").to_string()
    };
    let end = "which this machine does not give";
    assert_eq!(
        refused(1 << 20, usize::MAX),
        format!(
            "engine.new: 1048576 pages of 18446744073709551615 tokens need more bytes than can be counted, {end}"
        )
    );
    assert_eq!(
        refused(1 << 20, 1 << 30),
        format!("engine.new: 1048576 pages of 1073741824 tokens need 864691128455135232 bytes, {end}")
    );
}

#[test]
fn an_invalid_prompt_is_rejected() {
    let mut engine = engine(|_| {}).expect("an engine");
    let mut refused =
        |prompt: &[u32]| engine.submit(prompt, &[draws(1, 5)]).expect_err("refused").to_string();
    assert_eq!(refused(&[]), "engine.submit: the prompt is empty, expected at least 1 token");
    let fit = "expected at most 511, to leave room for one";
    assert_eq!(
        refused(&prompt(1, 512)),
        format!("engine.submit: the prompt has 512 tokens, the context 512: {fit}")
    );
    assert_eq!(
        refused(&prompt(1, 600)),
        format!("engine.submit: the prompt has 600 tokens, the context 512: {fit}")
    );
    assert_eq!(refused(&[1, 288, 2]), "engine.submit: the prompt has token 288, which is not in 0..288");
    let huge = "engine.submit: the prompt has token 4294967295, which is not in 0..288";
    assert_eq!(refused(&[u32::MAX]), huge);
    assert!(engine.is_idle(), "a rejected request is not queued");
    assert_eq!(engine.submit(&prompt(1, 511), &[draws(1, 5)]).expect("it fits").len(), 1);
}

#[test]
fn options_of_a_continuation_are_checked_when_it_is_submitted() {
    let mut engine = engine(|_| {}).expect("an engine");
    let mut refused = |change: fn(&mut GenerateOptions)| {
        let mut options = draws(0, 5);
        change(&mut options);
        // after a valid continuation
        engine.submit(&[1], &[draws(0, 5), options]).expect_err("refused").to_string()
    };
    assert_eq!(refused(|o| o.max_tokens = 0), "engine.submit: max_tokens = 0, expected at least 1");
    let text = |name: &str| format!("sampling.params: temperature = {name} is not a finite number >= 0");
    assert_eq!(refused(|o| o.sampling.temperature = -0.5), text("-0.5"));
    assert_eq!(refused(|o| o.sampling.temperature = f32::NAN), text("NaN"));
    assert_eq!(refused(|o| o.sampling.temperature = f32::INFINITY), text("inf"));
    let text = |value: &str| format!("sampling.params: top_p = {value} is not in (0, 1]");
    assert_eq!(refused(|o| o.sampling.top_p = 0.0), text("0"));
    assert_eq!(refused(|o| o.sampling.top_p = 1.5), text("1.5"));
    assert_eq!(refused(|o| o.sampling.top_p = f32::NAN), text("NaN"));
    assert_eq!(refused(|o| o.sampling.top_k = Some(0)), "sampling.params: top_k = 0 is not at least 1");
    let text = |value: &str| format!("sampling.params: min_p = {value} is not in [0, 1]");
    assert_eq!(refused(|o| o.sampling.min_p = -0.1), text("-0.1"));
    assert_eq!(refused(|o| o.sampling.min_p = 1.1), text("1.1"));
    let none = engine.submit(&[1], &[]).expect_err("refused").to_string();
    assert_eq!(none, "engine.submit: there is no continuation, expected at least 1");
    assert!(engine.is_idle(), "a rejected request is not queued");
}

#[test]
fn an_offset_in_the_options_is_ignored() {
    let mut shifted = case(1, 37, 44);
    shifted.options.sampling = SamplingParams { offset: 77, ..shifted.options.sampling };
    let outcomes = Setup::new("llama").run_batched(&[shifted, case(1, 37, 44)]);
    assert_eq!(outcomes[0], outcomes[1]);
}

#[test]
fn an_invalid_text_to_score_is_rejected() {
    let model = transformer(&folder("llama"), None);
    let refused = |tokens: &[u32]| {
        model.score(&Cpu::with_threads(1).unwrap(), tokens, Dtype::F32).expect_err("refused").to_string()
    };
    assert_eq!(refused(&[]), "model.score: there are 0 tokens, expected 1 to 512");
    assert_eq!(refused(&prompt(1, 513)), "model.score: there are 513 tokens, expected 1 to 512");
    assert_eq!(refused(&[0, 300]), "model.score: token 300 is not in 0..288");
}

#[test]
fn requests_start_in_the_order_of_submission() {
    let mut session = Setup::new("llama").with(|options| options.max_requests = 2).start();
    let ids = [1, 2, 3, 4].map(|seed| session.submit(&case(seed, 20, 5)));
    session.step();
    assert_eq!(ids.map(|id| session.generated(id).len()), [1, 1, 0, 0]);
    session.finish();
}

#[test]
fn ids_are_in_the_order_of_submission() {
    let mut session = Setup::new("llama").start();
    let first = session.submit_all(&[1], &[draws(0, 2), draws(1, 2)]);
    let second = session.submit(&Case { prompt: vec![2], options: draws(0, 2) });
    assert_eq!(
        [first[0], first[1], second].map(|id| id.to_string()),
        ["request 0", "request 1", "request 2"]
    );
    session.finish();
}
