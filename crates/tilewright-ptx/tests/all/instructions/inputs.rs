//! Test operands: edge cases, all 16-bit patterns, and several distributions of random bits.

use tilewright_ptx::isa::{pure::PureOp, types::Class};

/// Operands of an instruction, padded with 0.
pub(crate) type Args = [u64; 4];

/// A deterministic pseudorandom generator (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

const EDGES_16: [u64; 32] = [
    0, 1, 2, 3, 0x7f, 0x80, 0x81, 0xff, 0x100, 0x3ff, 0x400, 0x401, 0x7bff, 0x7c00, 0x7c01, 0x7e00, 0x7f7f,
    0x7f80, 0x7fc0, 0x7fff, 0x8000, 0x8001, 0x8080, 0xfbff, 0xfc00, 0xff80, 0xffff, 0x3c00, 0xbc00, 0x3f80,
    0x3555, 0x4248,
];

const EDGES_32: [u64; 52] = [
    0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 255, 256, 0x3210, 0xba98, 0x7654, 0x7fff_ffff, 0x8000_0000,
    0x8000_0001, 0xffff_ffff, 0xffff_fffe, 0x0001_0000, 0x0000_ffff, 0x007f_ffff, 0x0080_0000, 0x0080_0001,
    0x3f80_0000, 0xbf80_0000, 0x3f80_0001, 0x3f7f_ffff, 0x3f00_0000, 0x3f00_0001, 0x3fc0_0000, 0x4020_0000,
    0xc020_0000, 0x4b00_0001, 0x4b80_0001, 0x4f00_0000, 0x4f80_0000, 0xcf00_0001, 0x7f7f_ffff, 0x7f80_0000,
    0xff80_0000, 0x7fc0_0000, 0xffc0_0000, 0x3380_0000, 0xc2fd_0000, 0xc316_0000, 0x4300_0000, 0x3c00_bc00,
    0x7bff_7bff, 0x0200_7e00,
];

const EDGES_64: [u64; 32] = [
    0,
    1,
    2,
    63,
    64,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0x8000_0000_0000_0001,
    u64::MAX,
    u64::MAX - 1,
    0x8000_0000,
    0xffff_ffff_0000_0000,
    0x000f_ffff_ffff_ffff,
    0x0010_0000_0000_0000,
    0x3ff0_0000_0000_0000,
    0xbff0_0000_0000_0000,
    0x3ff0_0000_0000_0001,
    0x3fef_ffff_ffff_ffff,
    0x3ca0_0000_0000_0000,
    0x7fef_ffff_ffff_ffff,
    0x7ff0_0000_0000_0000,
    0xfff0_0000_0000_0000,
    0x7ff8_0000_0000_0000,
    0x36a0_0000_0000_0000,
    0x3690_0000_0000_0000,
    0x3690_0000_0000_0001,
    0x47ef_ffff_e000_0000,
    0x47ef_ffff_f000_0000,
    0x3ff0_0000_1000_0000,
    0x3ff0_0000_1000_0001,
];

fn edges(class: Class) -> &'static [u64] {
    match class {
        Class::Pred => &[0, 1],
        Class::B16 => &EDGES_16,
        Class::B32 => &EDGES_32,
        Class::B64 => &EDGES_64,
    }
}

fn ones(class: Class) -> u64 {
    match class {
        Class::Pred => 1,
        Class::B16 => 0xffff,
        Class::B32 => 0xffff_ffff,
        Class::B64 => u64::MAX,
    }
}

/// A float with few fraction bits and an exponent near 0, so that sums and products produce ties and cancellation. 32 bits may
/// hold a pair of 16-bit floats.
fn sparse(class: Class, random: &mut Random) -> u64 {
    let bits = |random: &mut Random, digits: u32, bias: u64, spread: u64| {
        let fraction =
            (1 << (digits - 1)) * random.below(2) + (1 << random.below(digits.into())) * random.below(2);
        let fraction = (fraction + random.below(2)) & ((1 << digits) - 1);
        random.below(2) << 63 | (bias - spread / 2 + random.below(spread)) << digits | fraction
    };
    let sixteen = |random: &mut Random| {
        let (digits, bias) = if random.below(2) == 0 { (10, 15) } else { (7, 127) };
        let bits = bits(random, digits, bias, 26);
        bits >> 63 << 15 | bits & 0x7fff
    };
    match class {
        Class::Pred => random.below(2),
        Class::B16 => sixteen(random),
        Class::B32 if random.below(2) == 0 => sixteen(random) | sixteen(random) << 16,
        Class::B32 => {
            let bits = bits(random, 23, 127, 60);
            bits >> 63 << 31 | bits & 0x7fff_ffff
        }
        Class::B64 => bits(random, 52, 1023, 130),
    }
}

fn random_operand(class: Class, random: &mut Random) -> u64 {
    let ones = ones(class);
    match random.below(4) {
        0 => random.next() & ones,
        1 => {
            let edges = edges(class);
            let edge = edges[random.below(edges.len() as u64) as usize];
            edge.wrapping_add(random.below(5)).wrapping_sub(2) & ones
        }
        2 => random.next() & (ones >> random.below(ones.count_ones().into())),
        _ => sparse(class, random),
    }
}

/// Combinations of edge cases, then random operands, then every 16-bit pattern for one or two operands.
pub(crate) fn inputs(op: PureOp) -> Vec<Args> {
    let classes = op.operands();
    let mut inputs = vec![[0; 4]];
    for (at, &class) in classes.iter().enumerate() {
        let step = if classes.len() == 4 { 5 } else { 1 };
        let edges: Vec<u64> = edges(class).iter().copied().step_by(step).collect();
        let with = |args: &Args| {
            let args = *args;
            edges.clone().into_iter().map(move |edge| {
                let mut args = args;
                args[at] = edge;
                args
            })
        };
        inputs = inputs.iter().flat_map(with).collect();
    }
    let mut random = Random(op.spelling().len() as u64);
    for _ in 0..20_000 {
        let mut args = [0; 4];
        for (arg, &class) in args.iter_mut().zip(classes) {
            *arg = random_operand(class, &mut random);
        }
        inputs.push(args);
    }
    if classes.len() <= 2 && matches!(classes[0], Class::B16 | Class::B32) {
        // an odd factor permutes the 16-bit patterns, so the other half and the other operand also take each value once
        let all = (0..1 << 16).map(|x: u64| {
            let partner = x.wrapping_mul(40_503) & 0xffff;
            let first = x | if classes[0] == Class::B32 { partner << 16 } else { 0 };
            [first, if classes.len() == 2 { partner } else { 0 }, 0, 0]
        });
        inputs.extend(all);
    }
    inputs
}
