//! What is done to single rows, in operations that give a number the same value wherever in a row it stands.
//!
//! Plain Rust: the compiler turns it into vectors of whatever the calling function has switched on.

const LANES: usize = 16;

/// The sum of `map(x)` over a row, in an order that depends on its length alone.
#[inline(always)]
fn sum(row: &[f32], map: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, &value) in sums.iter_mut().zip(chunk) {
            *sum += map(value);
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        *sum += map(value);
    }
    sums.iter().sum()
}

/// The RMS norm of a row, times a weight.
#[inline(always)]
pub(super) fn rms_norm(row: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mean = sum(row, |value| value * value) / row.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((out, &value), &weight) in out.iter_mut().zip(row).zip(weight) {
        *out = value * scale * weight;
    }
}

/// The activation of an MLP. Both are `x / (1 + e^-y)`, with y = x or a polynomial of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// GELU in the form with tanh.
    GeluTanh,
}

/// `activation(gate) * up`.
#[inline(always)]
pub(super) fn gated(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let rows = out.iter_mut().zip(gate).zip(up);
    match activation {
        Activation::Silu => {
            for ((out, &gate), &up) in rows {
                *out = gate * up / (1.0 + exp(-gate));
            }
        }
        Activation::GeluTanh => {
            for ((out, &gate), &up) in rows {
                // Twice sqrt(2 / pi), as tanh(y) is 2 / (1 + e^-2y) - 1.
                let y = 1.595_769 * (gate + 0.044_715 * gate * gate * gate);
                *out = gate * up / (1.0 + exp(-y));
            }
        }
    }
}

/// `cap * tanh(value / cap)`.
#[inline(always)]
pub(super) fn cap(values: &mut [f32], cap: f32) {
    for value in values {
        *value = cap * (1.0 - 2.0 / (1.0 + exp(*value * (2.0 / cap))));
    }
}

/// Scores to weights that add up to 1.
#[inline(always)]
pub(super) fn softmax(scores: &mut [f32]) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = scores.as_chunks::<LANES>();
    for chunk in chunks.iter().map(|chunk| &chunk[..]).chain([rest]) {
        for (largest, &score) in largest.iter_mut().zip(chunk) {
            *largest = if score > *largest { score } else { *largest };
        }
    }
    let largest = largest.iter().fold(f32::NEG_INFINITY, |one, &other| one.max(other));
    for score in scores.iter_mut() {
        *score = exp(*score - largest);
    }
    let scale = 1.0 / sum(scores, |score| score);
    for score in scores.iter_mut() {
        *score *= scale;
    }
}

/// Rotates the pairs (i, i + half) of a head.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (first, second) = head.split_at_mut(cosines.len());
    for (((one, other), &cosine), &sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
        let before = *one;
        *one = before * cosine - *other * sine;
        *other = *other * cosine + before * sine;
    }
}

const LOWEST: f32 = -87.3;
const HIGHEST: f32 = 88.3;
/// Added to a float below 2^22, it leaves the nearest whole number in the lowest bits.
const ROUNDING: f32 = 12_582_912.0;
const EXPONENT_OF_ONE: u32 = 127 << 23;

/// e to the power of x, to about one unit in the last place; polynomial and constants are those of Cephes' expf. Below
/// -87.3 and above 88.3 it stays what it is there; NaN stays NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUNDING;
    let whole = shifted - ROUNDING;
    let rest = x - whole * 0.693_359_4 - whole * -2.121_944_4e-4;
    let mut sum = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 5.0e-1] {
        sum = sum * rest + coefficient;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(EXPONENT_OF_ONE));
    (sum * rest * rest + rest + 1.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_that_of_the_library_to_a_few_units_in_the_last_place() {
        for step in 0..40_000 {
            let x = -87.0 + step as f32 * 175.0 / 40_000.0;
            let expected = f64::from(x).exp();
            assert!((f64::from(exp(x)) - expected).abs() <= 3e-7 * expected, "exp({x})");
        }
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
        assert!(exp(f32::INFINITY).is_finite());
    }

    #[test]
    fn weights_of_any_number_of_scores_add_up_to_one() {
        for count in [1, 2, 15, 16, 17, 100] {
            let mut scores: Vec<f32> = (0..count).map(|place| (place % 7) as f32 * 9.0 - 30.0).collect();
            let expected: Vec<f64> = scores.iter().map(|&score| f64::from(score).exp()).collect();
            let all: f64 = expected.iter().sum();
            softmax(&mut scores);
            for (score, expected) in scores.iter().zip(expected) {
                assert!((f64::from(*score) - expected / all).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn a_norm_is_a_norm_and_a_gate_a_gate() {
        let row: Vec<f32> = (0..37).map(|place| place as f32 - 11.5).collect();
        let weight: Vec<f32> = (0..37).map(|place| place as f32 * 0.1).collect();
        let mut out = vec![0.0; 37];
        rms_norm(&row, &weight, 1e-5, &mut out);
        let mean = row.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>() / 37.0;
        for place in 0..37 {
            let expected = f64::from(row[place]) / (mean + 1e-5).sqrt() * f64::from(weight[place]);
            assert!((f64::from(out[place]) - expected).abs() < 1e-5);
        }
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
        let activations: [(Activation, &dyn Fn(f64) -> f64); 2] =
            [(Activation::Silu, &silu), (Activation::GeluTanh, &gelu)];
        for (activation, by_the_book) in activations {
            gated(activation, &row, &weight, &mut out);
            for place in 0..37 {
                let expected = by_the_book(f64::from(row[place])) * f64::from(weight[place]);
                assert!((f64::from(out[place]) - expected).abs() < 2e-5);
            }
        }
        let mut capped = row.clone();
        cap(&mut capped, 5.0);
        for (capped, &value) in capped.iter().zip(&row) {
            assert!((f64::from(*capped) - 5.0 * (f64::from(value) / 5.0).tanh()).abs() < 2e-6);
        }
    }

    #[test]
    fn pairs_are_rotated_by_their_angles() {
        let mut head = vec![1.0, 2.0, 3.0, 4.0];
        let angles = [0.3_f32, 1.1];
        rotate(&mut head, &angles.map(f32::cos), &angles.map(f32::sin));
        for (pair, &angle) in angles.iter().enumerate() {
            let (one, other) = ((pair + 1) as f32, (pair + 3) as f32);
            assert!((head[pair] - (one * angle.cos() - other * angle.sin())).abs() < 1e-6);
            assert!((head[pair + 2] - (other * angle.cos() + one * angle.sin())).abs() < 1e-6);
        }
    }
}
