//! Sums of 8-bit products as tensor cores compute them.

/// The sum of products of 8-bit floats, 32 at a time: products and the sum so far are truncated to multiples of 2^-13 of the largest
/// one's power of two, as on an H100.
pub(crate) fn narrow_sum(products: impl Iterator<Item = f32>) -> f32 {
    let products: Vec<f32> = products.collect();
    products.chunks(32).fold(0.0, |sum, products| {
        let addends = || products.iter().copied().chain([sum]);
        let largest = addends().fold(0.0_f32, |max, addend| max.max(addend.abs()));
        if largest == 0.0 || !addends().all(f32::is_finite) {
            return addends().sum();
        }
        let unit = 2.0_f32.powi(largest.log2().floor() as i32 - 13);
        addends().map(|addend| (addend / unit).trunc() * unit).sum()
    })
}
