//! Speculative decoding: verification of chains of drafted tokens and sampling of replacements.
//!
//! With draft weights p and target weights q, drafted token d is accepted if `u · p(d) · ‖q‖ < q(d) · ‖p‖`. The
//! replacement of the first rejected token is drawn from `max(q · ‖p‖ - p · ‖q‖, 0)`, or from q if that is 0
//! everywhere. All drafted tokens are verified, for the acceptance counts.
//!
//! Shapes: drafts `[batch, n, vocab]` and target `[batch, n + 1, vocab]`, any row strides; requests `[batch]`; ids `[batch, n]` and
//! tokens `[batch, n + 1]` i32; outcomes `[batch, CHAIN_OUTCOME_WORDS]`. Grid: `[batch, 1, 1]`.

use super::{
    CandidateList, CtaCollectives, ExpAccuracy, KeptSet, MassScale, Number, ProductScale, RequestParams,
    RowKind, RowReader, RowStats, SampleConfig, SamplingRequest, VALID, Weights, check_threads,
    mass::{excess, fraction_of, less, of_fraction, of_mass},
};
use tilewright_ptx::{Builder, Global, Invalid, Kernel, Value, Var};

/// Words per outcome. Words 0–3: outcome of the invalid row that stopped the chain, or [`VALID`]. Words 4–7: 0 if
/// that row is the draft's, 1 if the target's; its position; accepted tokens; emitted tokens.
pub const CHAIN_OUTCOME_WORDS: usize = 8;

/// Records the kernel. Parameters: drafts, target, ids, tokens, outcomes; draft_batch, draft_position,
/// target_batch, target_position (u64 strides in elements), n, vocab (u32); requests. A failed chain has tokens -1 and counts 0. An
/// id outside of the vocabulary ends a draft.
///
/// # Errors
/// If `threads` is not supported.
pub fn chain<D: Number, T: Number>(name: &str, config: SampleConfig) -> Result<Kernel, Invalid> {
    check_threads(name, config.threads)?;
    Builder::dependent_kernel(name, config.threads, |k| {
        let chain = Chain::<D, T>::new(k, config);
        chain.clear();
        chain.run();
        chain.report();
    })
}

/// Chain of one request.
struct Chain<'k, D, T> {
    cta: CtaCollectives<'k>,
    list: CandidateList<'k>,
    kind: RowKind,
    drafts: Global<'k, D>,
    target: Global<'k, T>,
    draft_position: Value<'k, u64>,
    target_position: Value<'k, u64>,
    request: SamplingRequest<'k>,
    ids: Global<'k, i32>,
    tokens: Global<'k, i32>,
    outcome: Global<'k, u32>,
    n: Value<'k, u32>,
    vocab: Value<'k, u32>,
    state: ChainState<'k>,
}

/// Progress of a chain.
#[derive(Clone, Copy)]
struct ChainState<'k> {
    position: Var<'k, u32>,
    /// Whether no token has been rejected yet.
    open: Var<'k, bool>,
    accepted: Var<'k, u32>,
    emitted: Var<'k, u32>,
    stopped: Var<'k, bool>,
}

/// Draft at one position.
#[derive(Clone, Copy)]
struct Draft<'k, D> {
    exists: Value<'k, bool>,
    row: RowReader<'k, D>,
    /// Drafted token.
    token: Value<'k, u32>,
    /// Sum of its row.
    mass: Value<'k, f64>,
}

impl<'k, D: Number, T: Number> Chain<'k, D, T> {
    #[track_caller]
    fn new(k: &'k Builder, config: SampleConfig) -> Self {
        let (drafts, target) = (k.global::<D>("drafts"), k.global::<T>("target"));
        let (ids, tokens) = (k.global::<i32>("ids"), k.global::<i32>("tokens"));
        let outcomes = k.global::<u32>("outcomes");
        let stride = |name| k.param::<u64>(name);
        let (draft_batch, draft_position) = (stride("draft_batch"), stride("draft_position"));
        let (target_batch, target_position) = (stride("target_batch"), stride("target_position"));
        let (n, vocab) = (k.param::<u32>("n"), k.param::<u32>("vocab"));
        let requests = RequestParams::new(k);
        let at = k.cta().to_u64();
        let cta = CtaCollectives::new(k, config.threads, 1);
        Self {
            cta,
            list: CandidateList::new(&cta),
            kind: config.kind,
            drafts: drafts.at_wide(at * draft_batch),
            target: target.at_wide(at * target_batch),
            draft_position,
            target_position,
            request: requests.load(k.cta()).decode(),
            ids: ids.at_wide(at * n.to_u64()),
            tokens: tokens.at_wide(at * (n + 1).to_u64()),
            outcome: outcomes.at_wide(at * CHAIN_OUTCOME_WORDS as u64),
            n,
            vocab,
            state: ChainState {
                position: k.var("position", 0_u32),
                open: k.var("open", true),
                accepted: k.var("accepted", 0_u32),
                emitted: k.var("emitted", 0_u32),
                stopped: k.var("stopped", false),
            },
        }
    }

    /// Initializes the tokens to -1 and the outcome to [`VALID`].
    #[track_caller]
    fn clear(&self) {
        let k = self.cta.k;
        self.clear_tokens();
        let zero = k.constant(0_u32);
        k.when(k.thread().eq(0), || self.outcome.store_vector::<4>([k.constant(VALID), zero, zero, zero]));
    }

    #[track_caller]
    fn clear_tokens(&self) {
        let k = self.cta.k;
        k.repeat((k.thread(), self.n + 1), self.cta.threads, |i| self.tokens.at(i).store(-1_i32));
    }

    #[track_caller]
    fn run(&self) {
        let (k, state) = (self.cta.k, &self.state);
        k.loop_(|| {
            let position = state.position.get();
            let token = k.var("drafted", -1_i32);
            k.when(position.lt(self.n), || token.set(self.ids.at(position).load()));
            let token = token.get();
            let has_draft = token.reinterpret::<u32>().lt(self.vocab);
            let row = RowReader::new(
                &self.cta,
                self.drafts.at_wide(position.to_u64() * self.draft_position),
                self.vocab,
            );
            let mass = k.var("draft_mass", 0.0_f64);
            k.when(has_draft, || mass.set(self.draft_mass(&row)));
            k.break_if(state.stopped.get());
            let draft = Draft { exists: has_draft, row, token: token.reinterpret(), mass: mass.get() };
            self.verify(&draft);
            k.break_if(state.stopped.get() | !has_draft);
            state.position.set(position + 1);
        });
    }

    /// Sum of a draft row; stops the chain if the row is invalid.
    #[track_caller]
    fn draft_mass(&self, row: &RowReader<'k, D>) -> Value<'k, f64> {
        let k = self.cta.k;
        let stats = RowStats::new(&self.list, row, RowKind::Probs);
        self.stop_at(&stats, row, 0);
        let mass_scale = MassScale::new(self.vocab, stats.max + 0.0);
        let total = self.cta.total();
        k.when(stats.outcome.eq(VALID), || {
            row.each(1, |_, x| total.add(mass_scale.mass(x + 0.0)));
        });
        of_mass(total.of_all(), -mass_scale.power())
    }

    /// Stops the chain and reports the outcome if the row is invalid.
    #[track_caller]
    fn stop_at<E: Number>(&self, stats: &RowStats<'k>, row: &RowReader<'k, E>, of_target: u32) {
        let (k, state) = (self.cta.k, &self.state);
        k.when(stats.outcome.ne(VALID), || {
            state.stopped.set(true);
            stats.write(&self.cta, row, self.outcome, k.constant(0));
            let location = [k.constant(of_target), state.position.get()];
            k.when(k.thread().eq(0), || self.outcome.plus(4).store_vector::<2>(location));
        });
    }

    /// Verifies the drafted token against the target row, or draws the token after the last draft.
    #[track_caller]
    fn verify(&self, draft: &Draft<'k, D>) {
        let (k, state, cta) = (self.cta.k, &self.state, self.cta);
        let position = state.position.get();
        let row =
            RowReader::new(&cta, self.target.at_wide(position.to_u64() * self.target_position), self.vocab);
        let stats = RowStats::new(&self.list, &row, self.kind);
        self.stop_at(&stats, &row, 1);
        k.when(stats.outcome.eq(VALID), || {
            let weights = Weights::new(self.list, row, ExpAccuracy::Full, &stats, &self.request);
            let kept = weights.apply_filters();
            let [test, draw] = self.request.stream.pair(k, position);
            let accepted = k.var("is_kept", false);
            k.when(draft.exists, || accepted.set(self.is_accepted(draft, &weights, &kept, test)));
            let one = accepted.get().select(1_u32, 0_u32);
            state.accepted.set(state.accepted.get() + one);
            k.when(state.open.get(), || {
                state.emitted.set(state.emitted.get() + one);
                let token = k.var("emitted_token", draft.token);
                k.when(!accepted.get(), || token.set(self.draw_replacement(draft, &weights, &kept, draw)));
                k.sync_threads(); // after the initialization to -1
                k.when(k.thread().eq(0), || self.tokens.at(position).store(token.get().reinterpret::<i32>()));
            });
            state.open.set(state.open.get() & accepted.get());
        });
    }

    /// Whether the drafted token is accepted.
    #[track_caller]
    fn is_accepted(
        &self,
        draft: &Draft<'k, D>,
        weights: &Weights<'k, T>,
        kept: &KeptSet<'k>,
        test: Value<'k, u64>,
    ) -> Value<'k, bool> {
        let p = (draft.row.element(draft.token) + 0.0).to_f64();
        let q = self.target_weight(weights, kept, draft.token).to_f64();
        less(of_fraction(test) * p * of_mass(kept.mass, -weights.mass_scale.power()), q * draft.mass)
    }

    /// Target weight of a token; 0 if the filters drop it.
    #[track_caller]
    fn target_weight(
        &self,
        weights: &Weights<'k, T>,
        kept: &KeptSet<'k>,
        token: Value<'k, u32>,
    ) -> Value<'k, f32> {
        let weight = weights.weight(token, weights.candidates.row.element(token));
        kept.contains(token, weight).select(weight, 0.0_f32)
    }

    /// Draws from the excess of the target over the draft, or from the target if there is no excess.
    #[track_caller]
    fn draw_replacement(
        &self,
        draft: &Draft<'k, D>,
        weights: &Weights<'k, T>,
        kept: &KeptSet<'k>,
        draw: Value<'k, u64>,
    ) -> Value<'k, u32> {
        let k = self.cta.k;
        let target_mass = of_mass(kept.mass, -weights.mass_scale.power());
        let bits = (self.vocab - 1).leading_zeros() + 31;
        let product_scale = ProductScale::new(bits, weights.rule.max_weight().to_f64() * draft.mass);
        let value = |index, x| weights.weight(index, x);
        let mass = |index, weight: Value<'k, f32>| {
            let found = k.var("mass", 0_u64);
            k.when(kept.contains(index, weight) & weight.gt(0.0), || {
                let p = (draft.row.element(index) + 0.0).to_f64();
                found.set(product_scale.mass(excess(weight.to_f64() * draft.mass, p * target_mass)));
            });
            found.get()
        };
        let (total, token) = (k.var("excess", 0_u64), k.var("token", 0_u32));
        k.when(draft.exists, || total.set(weights.candidates.sum(&value, &mass)));
        k.when_else(
            total.get().ne(0),
            || token.set(weights.candidates.first(&value, &mass, fraction_of(draw, total.get()) + 1)),
            || {
                k.when(draft.exists, || _ = weights.mass_of(kept)); // the last sum, for the draw
                token.set(weights.draw(kept, draw));
            },
        );
        token.get()
    }

    #[track_caller]
    fn report(&self) {
        let k = self.cta.k;
        let stopped = self.state.stopped.get();
        k.when(stopped, || {
            k.sync_threads(); // after the tokens of earlier positions
            self.clear_tokens();
        });
        let counts =
            [self.state.accepted.get(), self.state.emitted.get()].map(|count| stopped.select(0_u32, count));
        k.when(k.thread().eq(0), || self.outcome.plus(6).store_vector::<2>(counts));
    }
}
