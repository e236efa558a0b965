//! Fixed-point weights (masses), `e^x` and order-preserving keys.
//!
//! Sums of masses are order-independent. With b = [`mass_bits`] a weight becomes `weight / 2^⌊log2 max⌋ · 2^(b - 1)`,
//! truncated; b keeps the sum of a row below 2^63. A weight has 24 significant bits, so weights down to `2^(25 - b)` of
//! the maximum are exact; below a unit they become 0 and are never drawn.
//!
//! [`ProductScale`] builds products of two weights from masses, compares them, and converts them back to fixed point. They are f64,
//! which holds the product, and are compared by their bit patterns, whose order is that of the values.

use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_ptx::{Stored, Value};

/// Element types of rows.
pub trait Number: Stored {
    /// Dtype of the elements.
    const DTYPE: Dtype;
    /// Elements per 16 bytes.
    const PER_VECTOR: u32;
    /// Rounds to nearest.
    #[track_caller]
    fn narrow(x: Value<'_, f32>) -> Value<'_, Self>;
    /// Widens exactly.
    #[track_caller]
    fn widen(x: Value<'_, Self>) -> Value<'_, f32>;
}

/// Mass of an element, computed from its index and value.
pub(super) type MassFn<'a, 'k> = &'a dyn Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, u64>;

macro_rules! numbers {
    ($($ty:ty: $dtype:ident $per_vector:literal $narrow:expr, $widen:expr;)*) => {$(
        impl Number for $ty {
            const DTYPE: Dtype = Dtype::$dtype;
            const PER_VECTOR: u32 = $per_vector;
            fn narrow(x: Value<'_, f32>) -> Value<'_, Self> {
                $narrow(x)
            }
            fn widen(x: Value<'_, Self>) -> Value<'_, f32> {
                $widen(x)
            }
        }
    )*};
}
numbers! {
    f32: F32 4 std::convert::identity, std::convert::identity;
    f16: F16 8 Value::<f32>::to_f16, Value::<f16>::to_f32;
    bf16: Bf16 8 Value::<f32>::to_bf16, Value::<bf16>::to_f32;
}

/// Adding it rounds to an integer, which is in the low bits of the sum.
const ROUND: f32 = 1.5 * (1 << 23) as f32;

/// Smaller scaled temperatures act as 0: the scaled maximum is at least 1 then, and other scores are at least 2^-25 below it.
const MIN_DIVISOR: f32 = 1.0 / (1_u128 << 100) as f32;

/// Errors of [`ScaledExp`] beside those of rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpAccuracy {
    /// None: for outputs.
    Full,
    /// As if `log2(e) / temperature` were rounded to 24 bits: for draws, whose masses take three instructions less.
    RoundedTemperature,
}

/// `e^((x - max) / temperature)`, to 1.3 ulp including subnormal results; exactly 1 for the maximum.
///
/// Uses additions and multiplications per element only, so the simulator and every GPU give the same bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScaledExp<'k> {
    /// Power of two, about the reciprocal of the temperature: scaled distances from the maximum neither overflow nor vanish.
    scale: Value<'k, f32>,
    /// `-max · scale`
    offset: Value<'k, f32>,
    /// The scaled temperature.
    divisor: Value<'k, f32>,
    /// `log2(e) / divisor`, rounded, and the rest.
    factors: [Value<'k, f32>; 2],
    accuracy: ExpAccuracy,
}

impl<'k> ScaledExp<'k> {
    /// `temperature` is positive and finite.
    #[track_caller]
    pub(super) fn new(max: Value<'k, f32>, temperature: Value<'k, f32>, accuracy: ExpAccuracy) -> Self {
        // log2(e) - f32(log2(e))
        const LOG2_E_REST: f32 = 1.925_963e-8;
        let k = max.builder();
        let exponent_of = |x: Value<'k, f32>| x.abs().reinterpret::<u32>() >> 23;
        // of the larger one, so that the scaled maximum is finite, too
        let exponent = exponent_of(temperature).max(exponent_of(max)).max(1).min(253);
        let scale = ((k.constant(254_u32) - exponent) << 23).reinterpret::<f32>();
        let divisor = (temperature * scale).max(MIN_DIVISOR);
        let log2_e = k.constant(std::f32::consts::LOG2_E);
        let high = log2_e / divisor;
        let low = ((-high).mul_add(divisor, log2_e) + LOG2_E_REST) / divisor;
        Self { scale, offset: -max * scale, divisor, factors: [high, low], accuracy }
    }

    /// A number in [1, 2) and the bits of [`ROUND`] + n; the exponential is the number times 2^n. Exponents of e below `lowest`
    /// count as `lowest`. With [`ExpAccuracy::Full`] the number may be slightly outside.
    #[track_caller]
    fn parts(&self, x: Value<'k, f32>, lowest: f32) -> (Value<'k, f32>, Value<'k, u32>) {
        // minimax of (2^f - 1) / f for 0 <= f <= 1; with these roundings the number is below 2 for all f
        const Q: [f32; 5] = [1.866_671_4e-3, 9.018_189e-3, 0.055_798_89, 0.240_164_82, 0.693_151_3];
        let [high, low] = self.factors;
        // a product with a power of two is exact, so this is the scaled difference, rounded once
        let distance = x.mul_add(self.scale, self.offset).max(self.divisor * lowest);
        let rounded = distance.mul_add_down(high, ROUND);
        let fraction = distance.mul_add(high, -(rounded - ROUND));
        let fraction = match self.accuracy {
            ExpAccuracy::Full => distance.mul_add(low, fraction),
            ExpAccuracy::RoundedTemperature => fraction,
        };
        let q = Q[1..].iter().fold(x.builder().constant(Q[0]), |q, &next| q.mul_add(fraction, next));
        (fraction.mul_add(q, 1.0), rounded.reinterpret())
    }

    /// The exponential of `x`, which is at most the maximum.
    #[track_caller]
    pub(super) fn at(&self, x: Value<'k, f32>) -> Value<'k, f32> {
        // e^-104 is below half of the smallest subnormal; also clamps -inf
        let (number, n) = self.parts(x, -104.0);
        // scale in two steps, the first exact, so that a subnormal result is rounded once
        let n = (n - ROUND.to_bits()).reinterpret::<i32>();
        let half = (n >> 1_u32).reinterpret::<i32>();
        number * power_of_two(half) * power_of_two(n - half)
    }

    /// [`Self::at`] if the result is at least 2^-100, otherwise an unspecified number below that.
    #[track_caller]
    pub(super) fn at_normal(&self, x: Value<'k, f32>) -> Value<'k, f32> {
        let (number, n) = self.parts(x, -80.0);
        Self::scaled(number, n)
    }

    /// [`Self::at_normal`] and its mass.
    #[track_caller]
    pub(super) fn with_mass(
        &self,
        x: Value<'k, f32>,
        scale: MassScale<'k>,
    ) -> (Value<'k, f32>, Value<'k, u64>) {
        let (number, n) = self.parts(x, -80.0);
        let weight = Self::scaled(number, n);
        let mass = match self.accuracy {
            ExpAccuracy::Full => scale.mass_of_normal(weight),
            ExpAccuracy::RoundedTemperature => scale.mass_of_parts(number, n),
        };
        (weight, mass)
    }

    /// The number times 2^n, by its exponent.
    #[track_caller]
    fn scaled(number: Value<'k, f32>, n: Value<'k, u32>) -> Value<'k, f32> {
        (number.reinterpret::<u32>() + (n << 23)).reinterpret()
    }
}

/// `2^n` for n in -126..=127.
#[track_caller]
pub(super) fn power_of_two(n: Value<'_, i32>) -> Value<'_, f32> {
    ((n + 127).reinterpret::<u32>() << 23).reinterpret()
}

/// Integer key in the order of non-NaN floats; both zeros share one key.
#[track_caller]
pub(super) fn key(x: Value<'_, f32>) -> Value<'_, u32> {
    let bits = (x + 0.0).reinterpret::<u32>();
    (bits >> 31).eq(1).select(!bits, bits | 1 << 31)
}

/// Inverse of [`key`].
#[track_caller]
pub(super) fn of_key(key: Value<'_, u32>) -> Value<'_, f32> {
    (key >> 31).eq(1).select(key & !(1 << 31), !key).reinterpret()
}

/// Fixed-point bits b for rows of `vocab` weights: 63 minus the bits of `vocab - 1`.
pub fn mass_bits(vocab: u32) -> u32 {
    63 - (32 - vocab.saturating_sub(1).leading_zeros())
}

/// Fixed-point scale of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct MassScale<'k> {
    /// The exponent of a weight is subtracted from it to get the right shift of the digits, which begin at bit 63.
    down: Value<'k, u32>,
    /// `mass = weight · 2^power`
    power: Value<'k, i32>,
}

impl<'k> MassScale<'k> {
    /// Scale for rows of `vocab` weights with maximum `max`.
    #[track_caller]
    pub(super) fn new(vocab: Value<'k, u32>, max: Value<'k, f32>) -> Self {
        let bits = ((vocab - 1).leading_zeros() + 31).reinterpret::<i32>();
        let exponent = (max.reinterpret::<u32>() >> 23).max(1).reinterpret::<i32>();
        let shift = (bits - 24) - exponent;
        Self { down: (-shift + 40).reinterpret(), power: shift + 150 }
    }

    /// The p of `mass = weight · 2^p`.
    pub(super) fn power(self) -> Value<'k, i32> {
        self.power
    }

    /// Converts a non-negative weight to fixed point, truncated.
    #[track_caller]
    pub(super) fn mass(self, weight: Value<'k, f32>) -> Value<'k, u64> {
        let bits = weight.reinterpret::<u32>();
        let exponent = bits >> 23;
        // the leading digit is the highest bit, unless the weight is subnormal
        let digits = (bits << 8) & !(1 << 31) | exponent.eq(0).select::<u32>(0, 1 << 31);
        self.shifted(digits, exponent.max(1))
    }

    /// [`Self::mass`] of a normal weight.
    #[track_caller]
    pub(super) fn mass_of_normal(self, weight: Value<'k, f32>) -> Value<'k, u64> {
        let bits = weight.reinterpret::<u32>();
        self.shifted((bits << 8) | (1 << 31), bits >> 23)
    }

    /// [`Self::mass_of_normal`] of a number in [1, 2) times 2^n, from the bits of [`ROUND`] + n.
    #[track_caller]
    fn mass_of_parts(self, number: Value<'k, f32>, n: Value<'k, u32>) -> Value<'k, u64> {
        // the exponent of 1 is odd: its lowest bit is the leading digit
        self.shifted(number.reinterpret::<u32>() << 8, n - (ROUND.to_bits() - 127))
    }

    /// `digits · 2^-8` at an exponent. Shifts above 63 give 0.
    #[track_caller]
    fn shifted(self, digits: Value<'k, u32>, exponent: Value<'k, u32>) -> Value<'k, u64> {
        let k = digits.builder();
        k.pack32(k.constant(0), digits) >> (self.down - exponent)
    }

    /// Normalizer of weights with total mass `mass`.
    #[track_caller]
    pub(super) fn normalizer(self, mass: Value<'k, u64>) -> Normalizer<'k> {
        let zeros = leading_zeros(mass);
        let digits = mass << zeros;
        // 48 bits of the mass as two f32, and its reciprocal likewise
        let part = |from: u32| ((digits >> from).low() & 0xff_ffff).to_f32();
        let (high, low) = (part(40) * 2_f32.powi(-23), part(16) * 2_f32.powi(-47));
        let reciprocal = high.recip_exact();
        let rest = low.mul_add(-reciprocal, high.mul_add(-reciprocal, 1.0));
        let power = self.power + (zeros.reinterpret::<i32>() - 63);
        let half = power >> 1_u32;
        let scales = [power_of_two(half), power_of_two(power - half)];
        Normalizer { scales, reciprocal, rest: reciprocal * rest }
    }
}

/// Divides weights by their sum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Normalizer<'k> {
    scales: [Value<'k, f32>; 2],
    reciprocal: Value<'k, f32>,
    /// Residual of the reciprocal.
    rest: Value<'k, f32>,
}

impl<'k> Normalizer<'k> {
    /// Normalized weight, rounded once.
    #[track_caller]
    pub(super) fn normalize(&self, weight: Value<'k, f32>) -> Value<'k, f32> {
        let scaled = weight * self.scales[0] * self.scales[1];
        scaled.mul_add(self.reciprocal, scaled * self.rest)
    }
}

/// Leading zeros of 64 bits.
#[track_caller]
pub(super) fn leading_zeros(x: Value<'_, u64>) -> Value<'_, u32> {
    let (high, low) = (x.high(), x.low());
    high.eq(0).select(low.leading_zeros() + 32, high.leading_zeros())
}

/// `⌈share · mass⌉` for a share in (0, 1), exact; `mass` is below 2^63.
#[track_caller]
pub(super) fn part_of<'k>(share: Value<'k, f32>, mass: Value<'k, u64>) -> Value<'k, u64> {
    let bits = share.reinterpret::<u32>();
    let exponent = bits >> 23;
    let digits = ((bits & 0x7f_ffff) | exponent.eq(0).select::<u32>(0, 1 << 23)).to_u64();
    // share = digits / 2^down, and digits · mass = middle · 2^32 + lowest
    let down = share.builder().constant(150) - exponent.max(1);
    let low = mass.low().to_u64() * digits;
    let middle = mass.high().to_u64() * digits + (low >> 32);
    let lowest = low.low();
    let far = down.ge(32);
    let beyond = far.select(down - 32, 0_u32);
    let near = far.select(0_u32, down);
    let whole_far = middle >> beyond;
    let exact_far = (whole_far << beyond).eq(middle) & lowest.eq(0);
    let whole_near = (middle << (near.builder().constant(32) - near)) + (lowest >> near).to_u64();
    let exact_near = ((lowest >> near) << near).eq(lowest);
    let whole = far.select(whole_far, whole_near);
    let exact = far.select(exact_far, exact_near);
    whole + exact.select(0_u64, 1_u64)
}

/// `⌊fraction · mass / 2^64⌋`
#[track_caller]
pub(super) fn fraction_of<'k>(fraction: Value<'k, u64>, mass: Value<'k, u64>) -> Value<'k, u64> {
    let halves = |x: Value<'k, u64>| (x.high().to_u64(), x.low().to_u64());
    let ((ah, al), (bh, bl)) = (halves(fraction), halves(mass));
    let one = ah * bl + ((al * bl) >> 32);
    let two = al * bh + one.low().to_u64();
    ah * bh + (one >> 32) + (two >> 32)
}

/// `mass · 2^power`, rounded once.
#[track_caller]
pub(super) fn of_mass<'k>(mass: Value<'k, u64>, power: Value<'k, i32>) -> Value<'k, f64> {
    let k = mass.builder();
    let shifted = mass.high().to_f64() * k.constant(2_f64.powi(32));
    (shifted + mass.low().to_f64()) * f64_power_of_two(power)
}

/// A fraction of 2^64 with 11 low zero bits, as a number in [0, 1).
#[track_caller]
pub(super) fn of_fraction(fraction: Value<'_, u64>) -> Value<'_, f64> {
    let k = fraction.builder();
    of_mass(fraction, k.constant(-64))
}

/// `2^n` for n in -1022..=1023.
#[track_caller]
fn f64_power_of_two(n: Value<'_, i32>) -> Value<'_, f64> {
    ((n + 1023).reinterpret::<u32>().to_u64() << 52_u32).reinterpret()
}

#[track_caller]
pub(super) fn less<'k>(a: Value<'k, f64>, b: Value<'k, f64>) -> Value<'k, bool> {
    a.reinterpret::<u64>().lt(b.reinterpret::<u64>())
}

/// `max(a - b, 0)`
#[track_caller]
pub(super) fn excess<'k>(a: Value<'k, f64>, b: Value<'k, f64>) -> Value<'k, f64> {
    let minus = (b.reinterpret::<u64>() ^ (1_u64 << 63)).reinterpret::<f64>();
    let difference = (a + minus).reinterpret::<u64>();
    less(b, a).select(difference, 0_u64).reinterpret()
}

/// Fixed-point scale of f64 values up to `max`, for masses of up to `bits` bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProductScale<'k> {
    shift: Value<'k, i32>,
}

impl<'k> ProductScale<'k> {
    #[track_caller]
    pub(super) fn new(bits: Value<'k, u32>, max: Value<'k, f64>) -> Self {
        Self { shift: bits.reinterpret::<i32>() - exponent(max) - 53 }
    }

    /// Converts a value to fixed point, rounded.
    #[track_caller]
    pub(super) fn mass(self, x: Value<'k, f64>) -> Value<'k, u64> {
        let bits = x.reinterpret::<u64>();
        let digits = (bits & ((1 << 52) - 1)) | (1 << 52);
        let shift = exponent(x) + self.shift;
        let (down, up) = ((-shift).max(0).reinterpret::<u32>(), shift.max(0).reinterpret::<u32>());
        let rounded = (((digits << 1_u32) >> down) + 1) >> 1_u32;
        // products of weights are never subnormal: an exponent of 0 means 0
        exponent(x).eq(0).select(0_u64, rounded << up)
    }
}

#[track_caller]
fn exponent(x: Value<'_, f64>) -> Value<'_, i32> {
    (x.reinterpret::<u64>() >> 52_u32).low().reinterpret()
}
