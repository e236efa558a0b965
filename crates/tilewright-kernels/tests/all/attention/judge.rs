//! Comparison of outputs with the f64 oracle.

use super::{Case, Segment, World, case::number};
use crate::{judge::Expected, sample::Sample};
use tilewright::{
    Dtype, HeadDim, Heads, Mask, Problem,
    attention::variant::{ExpressionVariant, Plain, Variant},
    reference::attention::{Definition, LogitIndex},
};

/// Runs a case with several seeds and checks each run.
pub(crate) fn check(case: &Case) {
    let plain = ExpressionVariant::of(&Plain).expect("it does nothing");
    check_with(case, &plain, &|_| Definition::default());
}

/// [`check`] with a variant and its definition per request.
pub(crate) fn check_with<'a>(
    case: &Case,
    variant: &ExpressionVariant,
    definition: &dyn Fn(usize) -> Definition<'a>,
) {
    let world = World::new(case, variant);
    let columns = Columns::new(&world);
    let definition = |request| columns.definition(request, definition(request));
    let scale = |request, at: LogitIndex| columns.scale(1, (request, at)).unwrap_or(1.0);
    let expected = Expected::scaled(&columns.sample(), &definition, &scale);
    for (items, kernel) in case.kernels(variant) {
        let kernel = kernel.unwrap_or_else(|why| panic!("{case:?}: {why}"));
        for seed in 0..case.seeds {
            let of = variant.name();
            let of = |why: &str| format!("{of}, {case:?}, {items:?} items, seed {seed}: {why}");
            let outcome =
                world.run(items, &kernel, seed).unwrap_or_else(|fault| panic!("{}", of(&fault.to_string())));
            expected.check(&outcome).unwrap_or_else(|why| panic!("{}", of(&why)));
        }
    }
}

/// The dense keys of each request.
struct Columns<'w> {
    world: &'w World,
    /// Per request and position, the key; none between blocks.
    keys: Vec<Vec<Option<(&'w Segment, usize)>>>,
}

impl<'w> Columns<'w> {
    fn new(world: &'w World) -> Self {
        let of_request = |request| {
            let mut keys = Vec::new();
            let has = |segment: &&Segment| segment.request.is_none_or(|of| of == request);
            for segment in world.segments.iter().filter(has) {
                for key in 0..segment.kv_len {
                    keys.resize(world.position(segment, key) as usize, None);
                    keys.push(Some((segment, key)));
                }
            }
            keys
        };
        Self { world, keys: (0..world.case.lengths.len()).map(of_request).collect() }
    }

    fn sample(&self) -> Sample {
        let (world, case, HeadDim { qk, vo }) = (self.world, &self.world.case, self.world.case.dim);
        let heads = Heads { qo: case.heads.0, kv: case.heads.1 };
        let problem = Problem::builder(heads, case.dim).dtypes(case.qo, case.kv).mask(Mask::Full);
        // conversions of queries to 16 bits are exact
        let problem = if case.has_fp8_products() { problem.fp8_queries() } else { problem };
        let problem = if case.fp8_outputs { problem.fp8_outputs() } else { problem };
        let problem = problem.scale(world.scale().abs() as f32).build().expect("it is sound");
        let read = |memory: &[u8], dtype: Dtype, at: usize, dim: usize| -> Vec<f32> {
            let elements = memory[at * dtype.size()..].chunks(dtype.size()).take(dim);
            elements.map(|bytes| number(dtype, bytes) as f32).collect()
        };
        let rows = (0..case.num_rows()).flat_map(|row| (0..heads.qo).map(move |head| (row, head)));
        let q = rows.flat_map(|(row, head)| read(&world.q, case.q(), world.row(qk, row, head), qk));
        let dense = |memory: &[u8], dim, len| -> Vec<Vec<f32>> {
            let of_key = |(key, head)| match key {
                Some((segment, key)) => read(memory, case.kv, world.element(dim, segment, (key, head)), len),
                None => vec![0.0; len],
            };
            let of_request = |keys: &Vec<_>| {
                keys.iter().flat_map(|key| (0..heads.kv).flat_map(move |head| of_key((*key, head)))).collect()
            };
            self.keys.iter().map(of_request).collect()
        };
        Sample {
            problem,
            lens: case.lengths.iter().zip(&self.keys).map(|(lens, keys)| (lens.0, keys.len())).collect(),
            q: q.map(|q| q * case.query_factor.signum() as f32).collect(),
            k: dense(&world.k, qk, qk),
            v: if case.is_latent() { dense(&world.k, qk, vo) } else { dense(&world.v, vo, vo) },
        }
    }

    /// Scale of a key (0) or its value (1), if there is one.
    fn scale(&self, of: usize, (request, at): (usize, LogitIndex)) -> Option<f64> {
        let (segment, key) = self.keys[request][at.j]?;
        Some(self.world.factor(of, segment, (key, at.g)))
    }

    /// A definition of a request with the masks and scales of the case.
    fn definition<'a>(&'a self, request: usize, of_variant: Definition<'a>) -> Definition<'a> {
        let (case, keys) = (&self.world.case, &self.keys[request]);
        // positions of rows are numbers of keys, without the gaps between blocks
        let gaps = keys.len() as i64 - case.lengths[request].1 as i64;
        let place = move |at: LogitIndex| LogitIndex { p: at.p - gaps, ..at };
        let scaled = move |of| {
            move |at: LogitIndex, x: &mut [f64]| {
                let scale = self.scale(of, (request, at)).unwrap_or(1.0);
                x.iter_mut().for_each(|x| *x *= scale);
            }
        };
        let Definition { logit, visible, output, .. } = of_variant;
        let sees = move |at: LogitIndex| {
            let number = |(segment, key): (&Segment, usize)| (segment.base + key, at.j as i64);
            keys[at.j].is_some_and(|key| case.sees(request, at.i, number(key)))
        };
        Definition {
            key: Box::new(scaled(0)),
            value: Box::new(scaled(1)),
            logit: Box::new(move |at, of| logit(place(at), of)),
            visible: Box::new(move |at| sees(at) && visible(place(at))),
            output: Box::new(move |at, o| output(place(at), o)),
            query: of_variant.query,
            sink: of_variant.sink,
            softmax: of_variant.softmax,
        }
    }
}
