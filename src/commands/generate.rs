//! `guildhall generate`: text from a checkpoint.

use super::trained::Trained;
use super::{CommandFailure, print, word};
use crate::cli::GenerateArgs;
use crate::data::{ChatEncoder, ChatTemplate};
use crate::model::{Caches, Context, Sampling, sample};
use crate::train::Error;

pub(super) fn run(arguments: GenerateArgs) -> Result<(), CommandFailure> {
    check(&arguments)?;
    let sampling = Sampling {
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        seed: arguments.seed,
    };
    // One rank: a single token has no batch to spread.
    let trained = Trained::open(&arguments.checkpoint, &arguments.backend.with(&[]), Some(1))?;
    check_family(&arguments, &trained)?;
    let (tokenizer, seq) = (&trained.tokenizer, trained.config.model.seq);
    let chat = arguments.chat.then(|| chat(&trained)).transpose()?;
    let mut prompt = match &chat {
        Some(chat) => chat.prompt(&arguments.prompt),
        None => tokenizer.encode(&arguments.prompt),
    }
    .map_err(CommandFailure::request)?;
    let end = chat.as_ref().and_then(ChatEncoder::end);
    let mut added = if chat.is_some() { prompt.len() } else { 0 };
    if prompt.is_empty() {
        // A document begins where another ended.
        prompt.push(tokenizer.end_of_text());
        added = 1;
    }
    if prompt.len() >= seq {
        return Err(CommandFailure::Request(anyhow::anyhow!(
            "--prompt has {} tokens, the model sees {seq} at once: shorten it to fewer than {seq} tokens",
            prompt.len()
        )));
    }
    let tokens = trained.run(|model, mesh, rank| {
        let context = Context::of_inference(mesh, 1);
        let mut tokens = prompt.clone();
        let (mut caches, mut seen) = (Caches::new(trained.config.model.layers), 0);
        for index in 0..arguments.tokens {
            if caches.len() + tokens.len() - seen > seq {
                // The window is full: go on with its second half, read anew.
                caches = Caches::new(trained.config.model.layers);
                seen = tokens.len() - seq / 2;
            }
            let logits = model.next_logits(&rank.device, &tokens[seen..], &mut caches, &context)?;
            seen = tokens.len();
            // A model may have more entries than its tokenizer; those say nothing.
            let logits = logits.elements(0..tokenizer.vocab());
            let logits = logits.f32s();
            if !logits.iter().all(|logit| logit.is_finite()) {
                return Err(Error::Scores { token: tokens.len() });
            }
            let next = sample(logits, &sampling, index as u64);
            if next == tokenizer.end_of_text() || Some(next) == end {
                break;
            }
            tokens.push(next);
        }
        Ok::<_, Error>(tokens)
    })?;
    let text = tokenizer.decode(&tokens[added..]).map_err(CommandFailure::run)?;
    print(&format!("{text}\n"))
}

/// Refuses a model that continues no text.
fn check_family(arguments: &GenerateArgs, trained: &Trained) -> Result<(), CommandFailure> {
    if !trained.config.model.is_causal() {
        return Err(CommandFailure::Request(anyhow::anyhow!(
            "{} holds a model of the family {:?}, which fills gaps and cannot write from left to right: generate with \
             a causal one, or see the loss of this one with `guildhall evaluate`",
            arguments.checkpoint.display(),
            trained.config.model.family.name()
        )));
    }
    if trained.config.model.stack_layers().is_some() {
        return Err(CommandFailure::Request(anyhow::anyhow!(
            "{} holds an encoder and a decoder, of the family {:?}: it reads one text and writes another, and has no text \
             to continue; use `guildhall translate {}`",
            arguments.checkpoint.display(),
            trained.config.model.family.name(),
            word(arguments.checkpoint.display())
        )));
    }
    Ok(())
}

/// What writes messages for a model: the template in its own folder, or by its recipe.
fn chat(trained: &Trained) -> Result<ChatEncoder, CommandFailure> {
    let (mut data, folder) = (trained.config.data.clone(), &trained.source.folder);
    let has = |name: &str| folder.join(name).is_file();
    if has("chat_template.jinja") || (has("tokenizer_config.json") && data.chat_template.is_none()) {
        data.tokenizer = folder.join("tokenizer.json").to_string_lossy().into_owned();
        data.chat_template = None;
    }
    let template = ChatTemplate::find(&data).map_err(CommandFailure::request)?;
    Ok(ChatEncoder::new(template, &trained.tokenizer, data.chat_loss))
}

fn check(arguments: &GenerateArgs) -> Result<(), CommandFailure> {
    let mut problems = Vec::new();
    if !(arguments.temperature >= 0.0 && arguments.temperature.is_finite()) {
        problems.push(format!("--temperature {}: use 0 or more", arguments.temperature));
    }
    if !(arguments.top_p > 0.0 && arguments.top_p <= 1.0) {
        problems.push(format!("--top-p {}: use more than 0, up to 1", arguments.top_p));
    }
    if problems.is_empty() { Ok(()) } else { Err(CommandFailure::Request(anyhow::anyhow!(problems.join("; ")))) }
}
