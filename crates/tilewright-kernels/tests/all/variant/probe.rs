//! A kernel that calls every hook of a variant, one call site per thread, and the same on the host.

use tilewright::attention::{
    Heads,
    variant::{At, ExpressionVariant, Hook, Input, Pair, QueryRow, Variant},
};
use tilewright_kernels::variant::{Arithmetic, Hooks, KeyPositions, PartialHook, arguments};
use tilewright_ptx::{Arg, Builder, Global, Kernel, Launch, Memory, Value};

/// Index of the logit in [`Results::numbers`].
pub(crate) const LOGIT: usize = 7;

/// Head counts of all probes.
pub(crate) const HEADS: Heads = Heads { qo: 4, kv: 2 };

/// Inputs of one hook call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) row: QueryRow,
    pub(crate) kv: u32,
    pub(crate) dim: usize,
    /// Arguments: both of a pair or a state, otherwise the first.
    pub(crate) x: [f32; 2],
    /// Whether the key exists. Otherwise the logits hook stores nothing, and its result is ignored.
    pub(crate) real: bool,
}

/// Results of each hook: query, key, update (two values each); value, logits, output; mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Results {
    pub(crate) numbers: [f32; 9],
    pub(crate) seen: bool,
}

/// Recording options of a probe kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    pub(crate) arithmetic: Arithmetic,
    /// Whether row inputs are declared before key inputs.
    pub(crate) staged: bool,
    /// How logits are computed.
    pub(crate) keys: Keys,
}

/// How the logits hook is applied to keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Keys {
    One,
    /// To a strip of two keys, of which the first one counts for even places and the second one for odd places.
    Strip,
    /// The same, with positions as offsets.
    StripOfOffsets,
}

/// All options.
pub(crate) fn ways() -> impl Iterator<Item = Way> {
    let of = |arithmetic| [false, true].map(|staged| Way { arithmetic, staged, keys: Keys::One });
    let strips = [Keys::Strip, Keys::StripOfOffsets].map(|keys| Way {
        arithmetic: Arithmetic::Fast,
        staged: true,
        keys,
    });
    [Arithmetic::Fast, Arithmetic::Exact].into_iter().flat_map(of).chain(strips)
}

/// The logit of a key after the hook, whose row inputs are known.
fn logit<'k>(
    hook: &PartialHook<'k, '_>,
    keys: Keys,
    kv: Value<'k, f32>,
    x: Value<'k, f32>,
    (real, is_first): (Value<'k, bool>, Value<'k, bool>),
) -> Value<'k, f32> {
    let positions = match keys {
        Keys::One => return hook.logit(&|input| (input == Input::Kv).then_some(kv), x, real),
        Keys::Strip => KeyPositions::Each(vec![is_first.select(kv, kv + 7.0), is_first.select(kv + 7.0, kv)]),
        Keys::StripOfOffsets => {
            KeyPositions::Offsets { first: kv - is_first.select(2.0, 5.0), offsets: vec![2.0, 5.0] }
        }
    };
    // halves are exact, so the factor changes nothing
    let xs = vec![x * is_first.select(0.5, 0.25), x * is_first.select(0.25, 0.5)];
    let logits = hook.logits(&positions, xs, x.builder().constant(2.0));
    is_first.select(logits[0], logits[1])
}

/// The inputs in the order of the kernel's parameters.
const INPUTS: [Input; 6] = [Input::Request, Input::Qo, Input::Kv, Input::QoHead, Input::KvHead, Input::Dim];

fn kernel(variant: &ExpressionVariant, way: Way) -> Kernel {
    let hooks = Hooks::of("probe", variant).expect("few parameters").with(way.arithmetic);
    let kernel = Builder::kernel("probe", 32, |k| {
        let inputs = INPUTS.map(|input| k.global::<f32>(input.name()));
        let arguments = ["x0", "x1", "real"].map(|name| k.global::<f32>(name));
        let (numbers, seen, count) = (k.global::<f32>("numbers"), k.global::<u32>("seen"), k.param("count"));
        let hooks = hooks.declare(k, (k.constant(HEADS.qo as u32), k.constant(HEADS.kv as u32)));
        // strips vote, so all lanes compute; those beyond the last repeat it, and store nothing
        let exists = (k.cta() * 32 + k.thread()).lt(count);
        let at = (k.cta() * 32 + k.thread()).min(count - 1);
        let of = |input: Input| {
            let place = INPUTS.iter().position(|other| *other == input).expect("no argument is asked for");
            inputs[place].at(at).load()
        };
        let row = |input| (way.staged && !matches!(input, Input::Kv | Input::Dim)).then(|| of(input));
        let all = |input| Some(of(input));
        let prepared = |hook| hooks.prepare(hook, &|_| None).bind(&row);
        let [x, y, real] = arguments.map(|x| x.at(at).load());
        let pair = |hook| prepared(hook).pair(&all, [x, y]);
        // strips store nothing
        let keys = if hooks.hooks().stores() { Keys::One } else { way.keys };
        let logits = prepared(Hook::Logits).bind(&|input| (input != Input::Kv).then(|| of(input)));
        let (max, sum) = prepared(Hook::Update).update(&all, x, y);
        let values: [Value<'_, f32>; 9] = [
            pair(Hook::Query),
            pair(Hook::Key),
            [max, sum],
            [
                prepared(Hook::Value).value(&all, x),
                logit(&logits, keys, of(Input::Kv), x, (exists & real.gt(0.0), (at & 1).eq(0))),
            ],
            [prepared(Hook::Output).output(&all, x); 2],
        ]
        .concat()[..9]
            .try_into()
            .expect("nine");
        let sees = prepared(Hook::Mask).mask(&all).select(1, 0);
        k.when(exists, || {
            store(numbers.at(at * 9), &values);
            seen.at(at).store(sees);
        });
    });
    kernel.expect("a valid kernel")
}

fn store<'k>(to: Global<'k, f32>, values: &[Value<'k, f32>]) {
    values.iter().enumerate().for_each(|(i, value)| to.plus(i).store(*value));
}

/// Results of the kernel at each place, and the final buffers.
pub(crate) fn run(variant: &ExpressionVariant, way: Way, places: &[Place]) -> (Vec<Results>, Vec<Vec<f32>>) {
    let mut memory = Memory::new();
    let mut column = |of: &dyn Fn(&Place) -> f32| {
        Arg::U64(memory.alloc_from(&places.iter().map(of).collect::<Vec<f32>>()))
    };
    let inputs = [
        column(&|place| place.row.request as f32),
        column(&|place| place.row.qo as f32),
        column(&|place| place.kv as f32),
        column(&|place| place.row.qo_head as f32),
        column(&|place| place.row.kv_head as f32),
        column(&|place| place.dim as f32),
        column(&|place| place.x[0]),
        column(&|place| place.x[1]),
        column(&|place| f32::from(u8::from(place.real))),
    ];
    let (numbers, seen) = (memory.alloc(places.len() * 36), memory.alloc(places.len() * 4));
    let tables: Vec<u64> = variant.tables().iter().map(|(_, table)| memory.alloc_from(table)).collect();
    let empty = |len: usize| vec![f32::NAN; len];
    let buffers: Vec<u64> =
        variant.buffers().iter().map(|(_, b)| memory.alloc_from(&empty(b.len()))).collect();
    let own = [Arg::U64(numbers), Arg::U64(seen), Arg::U32(places.len() as u32)];
    let of_variant = arguments(variant, |table| tables[table], |buffer| buffers[buffer]);
    let args = [&inputs[..], &own, &of_variant].concat();
    let kernel = kernel(variant, way);
    let grid = [places.len().div_ceil(32) as u32, 1, 1];
    Launch { kernel: &kernel, grid, args: &args, seed: 0 }
        .run(&mut memory)
        .unwrap_or_else(|fault| panic!("{}, {way:?}: {fault}", variant.name()));
    let numbers: Vec<f32> = memory.read(numbers, places.len() * 9).expect("all are written");
    let seen: Vec<u32> = memory.read(seen, places.len()).expect("all are written");
    let results = numbers.chunks(9).zip(seen).zip(places).map(|((numbers, seen), place)| {
        let mut numbers: [f32; 9] = numbers.try_into().expect("nine");
        numbers[LOGIT] = if place.real { numbers[LOGIT] } else { place.x[0] };
        Results { numbers, seen: seen != 0 }
    });
    let read = |(at, (_, buffer)): (&u64, &(String, tilewright::attention::variant::HookBuffer))| {
        memory.read(*at, buffer.len()).expect("they were filled")
    };
    (results.collect(), buffers.iter().zip(variant.buffers()).map(read).collect())
}

/// Same, on the host in f32; stores go to the buffers of the variant.
pub(crate) fn on_the_host(variant: &ExpressionVariant, places: &[Place]) -> Vec<Results> {
    let of = |place: &Place| {
        let at = At::scalars(place.row, place.kv, place.dim, HEADS);
        let [x, y] = place.x;
        let pair = Pair { first: x, second: y };
        let (query, key, update) =
            (variant.query(&at, pair), variant.key(&at, pair), variant.update(&at, x, y));
        let logit = if place.real { variant.logits(&at, x) } else { x };
        let numbers = [
            query.first,
            query.second,
            key.first,
            key.second,
            update.0,
            update.1,
            variant.value(&at, x),
            logit,
            variant.output(&at, x),
        ];
        Results { numbers, seen: variant.mask(&at) }
    };
    places.iter().map(of).collect()
}
