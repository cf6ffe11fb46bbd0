'use strict';

// The episode browser. All that agents wrote is set as textContent: none of it becomes an element.

const $ = id => document.getElementById(id);
const plays = JSON.parse($('plays').textContent);
const episodes = plays.flatMap(({scenario, agent, episodes}) => episodes.map(e => ({...e, scenario, agent})));
const RESULTS = {
  '': () => true,
  won: e => e.won,
  lost: e => !e.won,
  invalid: e => e.invalid > 0,
  mistake: e => e.mistakes > 0,
};
// What the address's fragment keeps beside the chosen episode: its names, and the controls that they fill.
const FIELDS = {'only-agent': 'agent', result: 'result', 'only-index': 'index', text: 'text', against: 'against'};

let matching = [];
let chosen = null;
let step = 0;
let timer = null;
let saving = null;

const signed = number => (number < 0 ? '-' : '+') + Math.abs(Number(number.toFixed(4)));
const counted = (number, noun) => `${number} ${noun}${number === 1 ? '' : 's'}`;
const playsOf = scenario => plays.filter(play => play.scenario === scenario);
const partner = () => chosen && episodes.find(e =>
  e.scenario === chosen.scenario && e.agent === $('against').value && e.index === chosen.index);

function made(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

function resultOf(e) {
  const ended = e.success === null ? e.outcome : e.success ? 'success' : 'no success';
  const parts = [ended, e.invalid && counted(e.invalid, 'invalid answer'), e.mistakes && counted(e.mistakes, 'mistake')];
  return parts.filter(Boolean).join(', ');
}

// ── filters ──

function fill(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([text, value]) => new Option(text, value)));
  select.value = options.some(([, value]) => value === before) ? before : options[0][1];
}

function fillAgents() {
  fill($('agent'), [['all', ''], ...playsOf($('scenario').value).map(play => [play.agent, play.agent])]);
}

function fillAgainst() {
  const others = chosen ? playsOf(chosen.scenario).filter(play => play.agent !== chosen.agent) : [];
  fill($('against'), [['nobody', ''], ...others.map(play => [play.agent, play.agent])]);
}

const wrote = (turn, text) => `${turn.answer ?? ''}\n${turn.reasoning ?? ''}`.toLowerCase().includes(text);
const sought = () => $('text').value.trim().toLowerCase();

function matches(e) {
  const index = Number($('index').value);
  return e.scenario === $('scenario').value
    && (!$('agent').value || e.agent === $('agent').value)
    && (!index || e.index === index)
    && RESULTS[$('result').value](e)
    && (!sought() || e.turns.some(turn => wrote(turn, sought())));
}

function filter() {
  matching = episodes.filter(matches);
  showKept();
  showList();
  if (!matching.includes(chosen)) choose(matching[0] ?? null);
}

function showKept() {
  const kept = new Map();
  for (const {agent, finished, episodes} of playsOf($('scenario').value)) {
    const many = episodes.length < finished ? `the first ${episodes.length} of ${finished}` : `all ${finished}`;
    kept.set(many, [...(kept.get(many) ?? []), agent]);
  }
  const whose = agents => kept.size === 1 ? 'each agent' : agents.join(', ');
  const parts = [...kept].map(([many, agents]) => `${many} of ${whose(agents)}`);
  $('kept').textContent = `Episodes in this file: ${parts.join('; ')}.`;
}

function showList() {
  $('count').textContent = `${counted(matching.length, 'episode')} ${matching.length === 1 ? 'matches' : 'match'}.`;
  $('episodes').replaceChildren(...matching.map(listed));
  mark();
}

function listed(e) {
  const row = document.createElement('tr');
  const agent = document.createElement('td');
  const regret = e.regret === null ? '–' : e.regret.toFixed(3);
  agent.append(made('button', e.agent));
  row.append(agent, ...[e.index, e.seed, e.turns.length, signed(e.return), resultOf(e), regret].map(x => made('td', x)));
  row.onclick = () => choose(e);
  return row;
}

function mark() {
  [...$('episodes').rows].forEach((row, i) => row.setAttribute('aria-selected', matching[i] === chosen));
}

// ── the chosen episode ──

function choose(episode) {
  pause();
  chosen = episode;
  const found = chosen && sought() ? chosen.turns.findIndex(turn => wrote(turn, sought())) : 0;
  step = Math.max(0, found);
  fillAgainst();
  mark();
  show();
}

const length = () => Math.max(chosen?.turns.length ?? 0, partner()?.turns.length ?? 0);

function go(to) {
  step = Math.max(0, Math.min(length() - 1, to));
  show();
}

function show() {
  $('player').hidden = !chosen;
  if (chosen) {
    $('scrub').max = Math.max(1, length());
    $('scrub').value = step + 1;
    $('place').textContent = `step ${step + 1} of ${length()}`;
    const panes = [pane(chosen)];
    if ($('against').value) panes.push(partner() ? pane(partner()) : absent($('against').value));
    $('panes').replaceChildren(...panes);
  }
}

function absent(agent) {
  const article = document.createElement('article');
  article.append(made('h3', agent), made('p', `This file holds no episode of it with index ${chosen.index}.`));
  return article;
}

function pane(e) {
  const article = $('pane').content.firstElementChild.cloneNode(true);
  const put = (name, text, mark) => {
    const part = article.querySelector(`.${name}`);
    part.textContent = text ?? '';
    part.hidden = text === undefined;
    if (mark) part.classList.add(mark);
  };
  const at = Math.min(step, e.turns.length - 1);
  const turn = e.turns[at];
  const line = e.line === null ? '' : ` · episode ${e.line} of its record`;
  put('name', `${e.agent} · index ${e.index} · start ${e.seed}${line}`);
  put('state', turn?.state);
  put('reasoning', turn?.reasoning);
  put('answer', turn?.answer);
  put('move', turn && `step ${at + 1}: ${turn.action ?? `no legal action (${turn.failure})`}`, turn?.failure && 'invalid');
  put('sums', turn && sums(e.turns, at));
  put('end', at + 1 < e.turns.length ? undefined : ending(e), e.won && 'won');
  return article;
}

function sums(turns, at) {
  const total = turns.slice(0, at + 1).reduce((sum, turn) => sum + turn.reward, 0);
  const regret = turns[at].regret === undefined ? '' : ` · regret ${turns[at].regret.toFixed(3)}`;
  return `reward ${signed(turns[at].reward)} · return so far ${signed(total)}${regret}`;
}

function ending(e) {
  const success = {true: ', success', false: ', no success', null: ''}[e.success];
  return `The end: ${e.outcome} after ${counted(e.turns.length, 'step')}, return ${signed(e.return)}${success}.`;
}

// ── playing ──

function pause() {
  clearInterval(timer);
  timer = null;
  $('play').textContent = 'play';
}

function play() {
  if (step + 1 >= length()) go(0);
  timer = setInterval(advance, 1000 / Number($('speed').value));
  $('play').textContent = 'pause';
}

function advance() {
  go(step + 1);
  if (step + 1 >= length()) {
    pause();
    save();
  }
}

const toggle = () => timer ? pause() : play();

function scrub(to) {
  pause();
  go(to);
}

// ── the address ──

function address() {
  const kept = new URLSearchParams({scenario: $('scenario').value});
  if (chosen) Object.entries({agent: chosen.agent, index: chosen.index, step: step + 1}).forEach(x => kept.set(...x));
  for (const [name, id] of Object.entries(FIELDS)) if ($(id).value) kept.set(name, $(id).value);
  return `#${kept}`;
}

// Browsers refuse an address that changes too often: it follows when the hand, or the play, rests.
function save() {
  clearTimeout(saving);
  saving = setTimeout(() => { if (!timer) history.replaceState(null, '', address()); }, 250);
}

function restore() {
  const kept = new URLSearchParams(location.hash.slice(1));
  const set = (id, value) => { if ([...$(id).options].some(option => option.value === value)) $(id).value = value; };
  set('scenario', kept.get('scenario'));
  fillAgents();
  set('agent', kept.get('only-agent') ?? '');
  set('result', kept.get('result') ?? '');
  $('index').value = kept.get('only-index') ?? '';
  $('text').value = kept.get('text') ?? '';
  filter();
  const asked = episodes.find(e => e.scenario === $('scenario').value && e.agent === kept.get('agent')
    && e.index === Number(kept.get('index')));
  if (kept.has('index') && !asked) $('count').textContent += ' The episode of the link is not in this file.';
  if (asked) choose(asked);
  $('list').scrollTop = ($('episodes').rows[matching.indexOf(chosen)]?.offsetTop ?? 0) - 60;
  set('against', kept.get('against') ?? '');
  if (asked) go((Number(kept.get('step')) || 1) - 1);
  else show();
  if (kept.has('scenario')) $('replays').scrollIntoView();
}

// ── events ──

function inView(element) {
  const {top, bottom, height} = element.getBoundingClientRect();
  return height > 0 && top < innerHeight && bottom > 0;
}

function typed(event) {
  const act = {ArrowLeft: () => scrub(step - 1), ArrowRight: () => scrub(step + 1), ' ': toggle}[event.key];
  const own = event.key === ' ' ? 'select, input:not(#scrub), button, a, summary' : 'select, input, .scroll';
  const modified = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey;
  if (!act || modified || event.target.matches(own) || !inView($('player'))) return;
  event.preventDefault();
  act();
  save();
}

function listen() {
  const steps = {first: () => 0, back: () => step - 1, next: () => step + 1, last: () => length() - 1};
  for (const [id, to] of Object.entries(steps)) $(id).onclick = () => scrub(to());
  $('play').onclick = toggle;
  $('scrub').oninput = () => scrub($('scrub').value - 1);
  $('speed').onchange = () => { if (timer) { pause(); play(); } };
  $('against').onchange = () => go(step);
  $('scenario').onchange = () => { fillAgents(); filter(); };
  for (const id of ['agent', 'result']) $(id).onchange = filter;
  for (const id of ['index', 'text']) $(id).oninput = filter;
  $('filters').onsubmit = event => event.preventDefault();
  for (const kind of ['click', 'input', 'change']) $('replays').addEventListener(kind, save);
  $('replays').addEventListener('click', event => {
    if (event.detail) event.target.closest('button')?.blur(); // space then plays, instead of the button again
  });
  document.addEventListener('keydown', typed);
  window.addEventListener('hashchange', () => { if (location.hash.includes('scenario=')) restore(); });
}

if (episodes.length) {
  fill($('scenario'), [...new Set(plays.map(play => play.scenario))].map(name => [name, name]));
  listen();
  restore();
} else {
  $('replays').hidden = true;
}
